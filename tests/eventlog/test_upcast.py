"""Logs of earlier releases are read, and the run goes on in the present form."""

from __future__ import annotations

import msgspec
import pytest

from laminar.core.rules import LOGIC_VERSION
from laminar.eventlog.reader import read_log, read_raw
from laminar.eventlog.record import SCHEMA_VERSION, EventRecord, Header, StateHashRecord
from laminar.eventlog.replay import replay
from laminar.eventlog.restore import restore, take_over
from laminar.eventlog.schema_2 import _State, encode_schema_2
from laminar.eventlog.upcast import UPCASTS, state_digest
from tools.rows.golden import Golden, disk_of_golden, manifest

LOGS = [g for g in manifest() if g.name.startswith("schema_1/")]
OLDER = LOGS + [g for g in manifest() if g.name.startswith("schema_2/")]
NAMES = [golden.name for golden in OLDER]


def test_there_are_logs_of_every_kind() -> None:
    """Decisions missing at takeovers and at the end, state hashes, rotation."""
    found = {golden.name.removeprefix("schema_1/"): golden.facts for golden in LOGS}
    assert set(found) == {"hashed", "killed_often", "rotated", "unfinished"}
    assert found["killed_often"].unlogged and found["hashed"].hashes
    assert replay(disk_of_golden(LOGS[-1])).unlogged


@pytest.mark.parametrize("log", OLDER, ids=NAMES)
def test_a_run_of_an_older_schema_goes_on_in_the_present_one(log: Golden) -> None:
    """Segments of both lie in one history; what was owed at its end is written, nothing else."""
    disk = disk_of_golden(log)
    before = [record for _, record in read_log(disk)]
    owed = replay(disk).unlogged
    take_over(disk, restore(disk), logic=LOGIC_VERSION, run="r", seed=0, config_hash="")
    after = [record for _, record in read_log(disk)]
    header = after[len(before)]
    assert isinstance(header, Header) and header.schema == SCHEMA_VERSION
    schema = int(log.name[len("schema_")])
    assert {record.schema for record in before if isinstance(record, Header)} == {schema}
    assert after == [*before, header, *owed]
    found = replay(disk)
    assert found.difference is None and found.unlogged == []
    assert log.facts and state_digest(schema, found.machine.state) == log.facts.digest


def test_every_schema_up_to_the_present_one_can_be_read() -> None:
    assert list(UPCASTS) == list(range(1, SCHEMA_VERSION + 1))


def test_a_dump_shows_old_records_as_they_are() -> None:
    disk = disk_of_golden(LOGS[0])
    kinds = [row[2]["kind"] for row in read_raw(disk)]
    typed = [record for _, record in read_log(disk)]
    assert kinds.count("event") == sum(isinstance(r, EventRecord) for r in typed)
    assert kinds.count("state-hash") == sum(isinstance(r, StateHashRecord) for r in typed)


def test_a_start_uses_a_snapshot_of_schema_2() -> None:
    """The segments before it may be gone, so it may be the only way to the state."""
    log = next(g for g in OLDER if g.facts is not None and g.facts.snapshots)
    restored = restore(disk_of_golden(log))
    assert restored.unusable == {}
    assert restored.snapshot is not None and restored.snapshot.schema == 2


def test_the_old_form_has_no_field_that_came_later() -> None:
    """Also when it is set: a hash of schema 2 says nothing of it."""
    state = replay(disk_of_golden(OLDER[-1])).machine.state
    old = msgspec.msgpack.decode(encode_schema_2(state))
    assert list(old) == list(_State.__struct_fields__)
    assert old["ledger"]["tokens"].keys() == {"issued", "trained", "evaluated", "dropped"}
    for actor in old["actors"].values():
        assert list(actor)[-3:] == ["alive", "ready", "last_peer_seq"]
