"""Logs of earlier releases, kept as they were written, still lead to the same decisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.core.machine import LOGIC_VERSION
from laminar.core.state import digest
from laminar.eventlog.reader import read_log, read_raw
from laminar.eventlog.record import SCHEMA_VERSION, EventRecord, Header, StateHashRecord
from laminar.eventlog.replay import replay
from laminar.eventlog.restore import restore, take_over
from laminar.eventlog.upcast import UPCASTS
from tests.eventlog.memory_disk import MemoryDisk

GOLDEN = Path(__file__).parent.parent / "golden"
LOGS = sorted(path.parent for path in GOLDEN.glob("schema_1/*/expected.json"))


def disk_of(log: Path) -> MemoryDisk:
    return MemoryDisk({path.name: path.read_bytes() for path in log.glob("events-*")})


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name)
def test_a_log_of_schema_1_replays_identically(log: Path) -> None:
    """Every decision that is in it, every state hash, and the state at the end."""
    disk = disk_of(log)
    expected = json.loads((log / "expected.json").read_text())
    commands: list[int] = []
    found = replay(disk, observer=lambda _, decided, state: commands.append(len(decided)))
    assert found.difference is None, str(found.difference)
    assert {record.schema for _, record in read_log(disk) if isinstance(record, Header)} == {1}
    assert expected == {
        "events": found.events,
        "decisions": found.decisions,
        "unlogged": sum(commands) - found.decisions,
        "hashes": found.hashes,
        "state": digest(found.machine.state),
    }


def test_there_are_logs_of_every_kind() -> None:
    """Decisions missing at takeovers and at the end, state hashes, rotation."""
    expected = {log.name: json.loads((log / "expected.json").read_text()) for log in LOGS}
    assert set(expected) == {"hashed", "killed_often", "rotated", "unfinished"}
    assert expected["killed_often"]["unlogged"] and expected["hashed"]["hashes"]
    assert replay(disk_of(GOLDEN / "schema_1" / "unfinished")).unlogged


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name)
def test_a_run_of_schema_1_goes_on_in_the_present_one(log: Path) -> None:
    """Segments of both lie in one history; what was owed at its end is written, nothing else."""
    disk = disk_of(log)
    before = [record for _, record in read_log(disk)]
    owed = replay(disk).unlogged
    take_over(disk, restore(disk), logic=LOGIC_VERSION, run="r", seed=0, config_hash="")
    after = [record for _, record in read_log(disk)]
    header = after[len(before)]
    assert isinstance(header, Header) and header.schema == SCHEMA_VERSION
    assert after == [*before, header, *owed]
    found = replay(disk)
    assert found.difference is None and found.unlogged == []
    state = json.loads((log / "expected.json").read_text())["state"]
    assert digest(found.machine.state) == state


def test_every_schema_up_to_the_present_one_can_be_read() -> None:
    assert list(UPCASTS) == list(range(1, SCHEMA_VERSION + 1))


def test_a_dump_shows_old_records_as_they_are() -> None:
    disk = disk_of(LOGS[0])
    kinds = [row[2]["kind"] for row in read_raw(disk)]
    typed = [record for _, record in read_log(disk)]
    assert kinds.count("event") == sum(isinstance(r, EventRecord) for r in typed)
    assert kinds.count("state-hash") == sum(isinstance(r, StateHashRecord) for r in typed)
