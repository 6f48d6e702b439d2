"""Scorecard rows 8 to 10: their engine finds nothing wrong with the log, and would if it were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from laminar.eventlog import record
from laminar.eventlog.record import Frames
from laminar.eventlog.writer import LogWriter
from laminar.sim.runtime.disk import CRASH_MODES, SimDisk
from tools.rows import log_damage
from tools.rows.crash_points import Crash, Scenario, calls_of
from tools.rows.log_damage import FIRST, ROWS, Size, cut_at, flip_at, real_log, try_crash

RECORDS = 12
SCENARIO = Scenario(events=24, snapshot_every=8, keep_bytes=0)
REMOVING = Scenario(events=40, snapshot_every=8, keep_bytes=2_048)
TINY = Size(RECORDS, (Scenario(3, 1_000, 0),), (Scenario(2, 1_000, 0),), 2, 1, 1)


def problems_of_crashes(scenario: Scenario, draws: int = 2) -> list[str]:
    found = []
    for call in range(1, calls_of(scenario) + 1):
        found += try_crash(scenario, call, draws)[1]
    return found


# --- nothing is wrong -------------------------------------------------------------------------


def test_a_cut_at_every_byte_keeps_what_is_before_it() -> None:
    log = real_log(RECORDS)
    assert len(log.records) == len(log.ends) == RECORDS and log.ends[-1] == len(log.data)
    assert [said for cut in range(len(log.data) + 1) if (said := cut_at(log, cut))] == []


def test_a_flip_in_every_byte_is_found_as_what_it_is() -> None:
    log = real_log(RECORDS)
    assert [said for at in range(len(log.data)) if (said := flip_at(log, at))] == []


@pytest.mark.parametrize("scenario", [SCENARIO, REMOVING])
def test_a_crash_in_every_disk_call_is_recovered_from(scenario: Scenario) -> None:
    assert problems_of_crashes(scenario) == []


def test_a_power_cut_after_a_kill_is_recovered_from() -> None:
    alone = Scenario(events=4, snapshot_every=2, keep_bytes=0)
    kills = [alone._replace(killed=call) for call in range(1, calls_of(alone) + 1)]
    assert [said for scenario in kills for said in problems_of_crashes(scenario, 1)] == []


# --- something is wrong -----------------------------------------------------------------------


def test_a_reader_that_drops_the_last_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    log, whole = real_log(RECORDS), Frames.__init__

    def shortened(self: Frames, segment: int, data: bytes, seed: int) -> None:
        whole(self, segment, data[: log.ends[-2]] if len(data) > log.ends[-2] else data, seed)

    monkeypatch.setattr(Frames, "__init__", shortened)
    assert cut_at(log, len(log.data)).startswith("refused: the event log grew")


def test_a_log_without_a_crc_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "zlib", SimpleNamespace(crc32=lambda body, seed=0: 0))
    log = real_log.__wrapped__(RECORDS)
    said = {flip_at(log, at) for at in range(log.ends[3], log.ends[4])}
    assert any(each.startswith("altered records were delivered") for each in said)


def test_a_reader_that_takes_damage_for_a_torn_tail_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = real_log(RECORDS)
    monkeypatch.setattr(Frames, "continued", lambda self: False)
    assert flip_at(log, log.ends[3] + 20).startswith("torn ")


def test_a_reader_that_takes_a_torn_tail_for_damage_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = real_log(RECORDS)
    monkeypatch.setattr(Frames, "continued", lambda self: True)
    assert cut_at(log, len(log.data) - 1).startswith("refused")
    assert "instead of" in flip_at(log, len(log.data) - 1)


def test_a_writer_that_does_not_sync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogWriter, "_sync", lambda self: None)
    crash = Crash(SCENARIO, 8)
    assert "found event 0 last" in crash.problem("none", 0)
    assert crash.problem("all", 0) == ""


def test_a_takeover_that_does_not_sync_what_it_takes_over_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = Scenario(events=12, snapshot_every=1_000, keep_bytes=0, killed=9)

    def problems() -> set[str]:
        crashes = [Crash(killed, call) for call in range(1, calls_of(killed) + 1)]
        return {crash.problem("none", 0) for crash in crashes}

    assert problems() == {""}
    monkeypatch.setattr(SimDisk, "sync", lambda self, name: None)
    assert any("before the takeover" in said for said in problems())


# --- the rows ---------------------------------------------------------------------------------


def test_rows_say_how_much_they_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_damage, "SIZES", {"pr": TINY, "release": TINY._replace(workers=2)})
    size = len(real_log(RECORDS).data)
    figures = {row.number: [row.run(gate) for gate in ("pr", "release")] for row in ROWS if row.run}
    assert sorted(figures) == [8, 9, 10]
    for in_one_process, in_two in figures.values():
        assert in_one_process == in_two
    assert figures[8][0] == (f"{size + 1:,} cuts, 0 with records lost or invented", True, "")
    assert figures[9][0] == (f"{size:,} flips, 0 not found as what they are", True, "")
    assert figures[10][0].reached.endswith("0 not recovered from")
    assert "0 problems" in capsys.readouterr().err


def test_a_row_that_falls_short_says_how_to_try_a_case_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_damage, "SIZES", {"pr": TINY})
    monkeypatch.setattr(Frames, "continued", lambda self: True)
    (row,) = (row for row in ROWS if row.number == 8)
    assert row.run is not None
    figure = row.run("pr")
    assert not figure.passed
    lines = figure.detail.splitlines()
    assert lines[0].startswith("cut at ") and lines[-1].startswith("and ")
    cut = int(lines[0].split(":")[0].removeprefix("cut at "))
    assert cut_at(real_log(RECORDS), cut).startswith("refused")


def test_each_mode_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(Crash, "problem", lambda self, mode, draw: tried.append(mode) or "")
    count, _ = try_crash(SCENARIO, 3, 4)
    assert count == len(tried) == 2 + 3 * 4
    assert set(tried) == set(CRASH_MODES)
    assert FIRST in SimDisk({FIRST: b""}).names()
