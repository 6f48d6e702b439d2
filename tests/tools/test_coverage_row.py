"""Row 7's reading of coverage's report: what is not executed, or not imported at all, is named."""

from __future__ import annotations

from tools.check.rows.coverage import ROOT, TABLE, File, Summary, _part, files, parts

WHOLE = Summary(num_statements=10, covered_lines=10, num_branches=4, covered_branches=4)
HALF = Summary(num_statements=10, covered_lines=8, num_branches=4, covered_branches=3)


def test_every_part_is_there() -> None:
    found = parts()
    assert found.keys() >= {"core", "eventlog", "events", "net.session", "net.frames"}
    assert all((ROOT / name).is_file() for names in found.values() for name in names)


def test_file_with_everything_executed() -> None:
    assert _part(["laminar/net/frames.py"], {"laminar/net/frames.py": File(WHOLE)}) == (100.0, ())


def test_branch_that_is_never_taken_is_named() -> None:
    found = _part(["laminar/net/frames.py"], {"laminar/net/frames.py": File(HALF, [7], [(6, 7)])})
    assert found.percent == 100 * 11 / 14
    assert found.missing == ("laminar/net/frames.py: lines [7], branches ['6->7']",)


def test_file_that_no_test_imports_is_named() -> None:
    found = _part(parts()["events"], {"laminar/events/codec.py": File(WHOLE)})
    assert "laminar/events/events.py: no test imports it" in found.missing


def test_files_of_the_row_are_those_that_it_runs() -> None:
    names = files()
    assert {TABLE, "tests/core/steps/test_batches.py", "tests/net/test_net_frames.py"} <= set(names)
    assert "tests/core/test_cost_at_size.py" not in names
    assert all((ROOT / name).is_file() for name in names)
