"""Logs of earlier releases are read, and the run goes on in the present form."""

from __future__ import annotations

import pytest

from laminar.core.machine import LOGIC_VERSION
from laminar.core.state import digest
from laminar.eventlog.reader import read_log, read_raw
from laminar.eventlog.record import SCHEMA_VERSION, EventRecord, Header, StateHashRecord
from laminar.eventlog.replay import replay
from laminar.eventlog.restore import restore, take_over
from laminar.eventlog.upcast import UPCASTS
from tools.rows.golden import Golden, disk_of_golden, manifest

LOGS = [g for g in manifest() if g.name.startswith("schema_1/")]
NAMES = [golden.name for golden in LOGS]


def test_there_are_logs_of_every_kind() -> None:
    """Decisions missing at takeovers and at the end, state hashes, rotation."""
    found = {golden.name.removeprefix("schema_1/"): golden.facts for golden in LOGS}
    assert set(found) == {"hashed", "killed_often", "rotated", "unfinished"}
    assert found["killed_often"].unlogged and found["hashed"].hashes
    assert replay(disk_of_golden(LOGS[-1])).unlogged


@pytest.mark.parametrize("log", LOGS, ids=NAMES)
def test_a_run_of_schema_1_goes_on_in_the_present_one(log: Golden) -> None:
    """Segments of both lie in one history; what was owed at its end is written, nothing else."""
    disk = disk_of_golden(log)
    before = [record for _, record in read_log(disk)]
    owed = replay(disk).unlogged
    take_over(disk, restore(disk), logic=LOGIC_VERSION, run="r", seed=0, config_hash="")
    after = [record for _, record in read_log(disk)]
    header = after[len(before)]
    assert isinstance(header, Header) and header.schema == SCHEMA_VERSION
    assert {record.schema for record in before if isinstance(record, Header)} == {1}
    assert after == [*before, header, *owed]
    found = replay(disk)
    assert found.difference is None and found.unlogged == []
    assert log.facts is not None and digest(found.machine.state) == log.facts.digest


def test_every_schema_up_to_the_present_one_can_be_read() -> None:
    assert list(UPCASTS) == list(range(1, SCHEMA_VERSION + 1))


def test_a_dump_shows_old_records_as_they_are() -> None:
    disk = disk_of_golden(LOGS[0])
    kinds = [row[2]["kind"] for row in read_raw(disk)]
    typed = [record for _, record in read_log(disk)]
    assert kinds.count("event") == sum(isinstance(r, EventRecord) for r in typed)
    assert kinds.count("state-hash") == sum(isinstance(r, StateHashRecord) for r in typed)
