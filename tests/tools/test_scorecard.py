"""The scorecard command: what it prints, writes and refuses, and when it exits with 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools.check import scorecard
from tools.check.rows.base import Figure, Gate, Row
from tools.check.rows.simulation import FIXED, fresh_seeds
from tools.check.rows.table import ROWS


def reached(gate: Gate) -> Figure:
    return Figure(f"all of them, {gate}", True)


def short(gate: Gate) -> Figure:
    return Figure("one of ten", False, "nine are missing")


def breaks(gate: Gate) -> Figure:
    raise RuntimeError("no disk left")


GOOD = Row(1, "it works", "all", "all, twice", reached)
UNTESTED = Row(2, "nobody knows", "some", "more", None)
SHORT = Row(3, "it is fast", "ten", "ten", short)
BROKEN = Row(4, "it is safe", "ten", "ten", breaks)


def run(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[Row, ...], folder: Path, *arguments: str
) -> int:
    monkeypatch.setattr(scorecard, "ROWS", rows)
    monkeypatch.setattr(scorecard, "DOCUMENT", folder / "scorecard.md")
    monkeypatch.setattr(sys, "argv", ["scorecard.py", *arguments])
    return scorecard.main()


def test_rows_that_reach_their_targets_or_do_not_run_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, (GOOD, UNTESTED), tmp_path) == 0
    printed = capsys.readouterr().out
    assert "ok     it works: all of them, pr" in printed
    assert "nobody knows: not run" in printed


@pytest.mark.parametrize(
    ("row", "said"), [(SHORT, "nine are missing"), (BROKEN, "RuntimeError: no disk left")]
)
def test_row_that_falls_short_or_breaks_fails_the_whole_and_the_others_run(
    row: Row,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, (row, GOOD), tmp_path) == 1
    printed = capsys.readouterr().out
    assert said in printed and "all of them" in printed


def test_rows_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, (GOOD, SHORT), tmp_path, "--but", "3") == 0
    assert "it is fast" not in capsys.readouterr().out


def test_every_change_is_tried_with_the_same_seeds_and_fresh_ones_are_a_commits_own() -> None:
    one, other = fresh_seeds(2_000, "0123456789abcdef"), fresh_seeds(2_000, "0123456889abcdef")
    assert FIXED["pr"] == range(1, 301) and len(one) == 2_000
    assert one == fresh_seeds(2_000, "0123456789abcdef")
    assert not set(one) & {*other, *FIXED["pr"], *FIXED["release"]}


def test_json_is_one_object_per_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, (GOOD, UNTESTED, SHORT), tmp_path, "--json", "--gate", "release")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["passed"] for line in lines] == [True, None, False]
    assert lines[0]["target"] == "all, twice" and lines[1]["reached"] == "not run"


def test_document_keeps_what_other_runs_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = (GOOD, UNTESTED, SHORT)
    run(monkeypatch, rows, tmp_path, "--write", "--gate", "release", "--rows", "1")
    run(monkeypatch, rows, tmp_path, "--write", "--rows", "3")
    table = (tmp_path / "scorecard.md").read_text().splitlines()[-3:]
    assert "not run" in table[0] and "all of them, release (" in table[0]
    assert table[1].count("not run") == 2
    assert "**short:** one of ten (" in table[2]


@pytest.mark.parametrize("rows", ["0", "99", "1,x", ""])
def test_rows_that_do_not_exist_are_refused(
    rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, (GOOD,), tmp_path, "--rows", rows)
    assert left.value.code == 2
    assert "name rows 1 to 1" in capsys.readouterr().err


def test_every_row_has_its_own_number_and_targets() -> None:
    assert [row.number for row in ROWS] == list(range(1, 31))
    assert all(row.promise and row.pr and row.release for row in ROWS)
