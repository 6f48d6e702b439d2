"""Kept logs lead to the decisions that are in them; logs of other decisions are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest

from laminar.core import machine, rules
from laminar.core.rules import LOGIC_VERSION, Rule, is_rule_active
from laminar.core.state.state import State
from laminar.core.state.work import Group
from laminar.core.steps import batching
from laminar.eventlog.reader import read_log, read_raw_log, scan_log
from laminar.eventlog.record import (
    SCHEMA_VERSION,
    DecisionRecord,
    EventRecord,
    LogOfOtherRelease,
    Record,
    SegmentHeader,
)
from laminar.eventlog.restore import restore_log
from laminar.events import codec
from laminar.events import commands as cmd
from laminar.events.events import ALL_EVENTS
from tools.check.rows.golden import (
    GOLDEN,
    Golden,
    Refused,
    disk_of_golden,
    follow,
    manifest,
    problem,
)
from tools.kit.logs import rewritten
from tools.kit.memory_disk import MemoryDisk
from tools.make.golden import RUNS

GOLDENS = manifest()
CALM = next(golden for golden in GOLDENS if golden.name == "calm")


@pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])
def test_golden_log_replays_as_written(golden: Golden) -> None:
    """If the change of a decision was meant: python tools/make/golden.py (docs/changing.md)."""
    assert problem(golden, disk_of_golden(golden)) == ""


def test_the_kept_logs_are_those_that_are_made() -> None:
    names = [golden.name for golden in GOLDENS]
    assert names == [recipe.name for recipe in RUNS]
    assert sorted(path.stem for path in GOLDEN.glob("*.zst")) == sorted(names)


def test_every_event_is_in_a_golden_log() -> None:
    found = {
        type(codec.decode_event(record.event))
        for golden in GOLDENS
        for _, record in read_log(disk_of_golden(golden))
        if isinstance(record, EventRecord)
    }
    assert set(ALL_EVENTS) == found


def calm_records() -> list[Record]:
    return [record for _, record in read_log(disk_of_golden(CALM))]


def with_another_decision(records: list[Record]) -> Iterator[Record]:
    """The seed of a trajectory in the middle of the run."""
    left = len(records) // 2
    for record in records:
        left -= 1
        if left < 0 and isinstance(record, DecisionRecord):
            command = codec.decode_command(record.command)
            if isinstance(command, cmd.GenerateTrajectory):
                other = codec.encode(msgspec.structs.replace(command, seed=77))
                record = msgspec.structs.replace(record, command=msgspec.Raw(other))
                left = len(records)
        yield record


def test_log_with_another_decision_is_restored_with_the_difference_and_its_end() -> None:
    """Who restores it can say what differs, and where the log ends."""
    disk = MemoryDisk(rewritten(with_another_decision(calm_records())))
    restored = restore_log(disk)
    assert "seed=77" in str(restored.replay.difference)
    assert restored.tail == scan_log(disk)
    with pytest.raises(Refused, match="seed=77"):
        follow(disk)


def of_another_release(records: list[Record], **changes: int) -> Iterable[Record]:
    for record in records:
        is_header = isinstance(record, SegmentHeader)
        yield msgspec.structs.replace(record, **changes) if is_header else record


@pytest.mark.parametrize("changes", [{"logic": LOGIC_VERSION - 1}, {"logic": 99}, {"schema": 99}])
def test_log_of_another_release_is_refused_by_its_versions_but_can_be_dumped(
    changes: dict[str, int],
) -> None:
    disk = MemoryDisk(rewritten(of_another_release(calm_records(), **changes)))
    has = {"schema": SCHEMA_VERSION, "logic": LOGIC_VERSION} | changes
    named = f"schema {has['schema']}, logic version {has['logic']}; this program has"
    with pytest.raises(LogOfOtherRelease, match=named):
        restore_log(disk)
    assert len(list(read_raw_log(disk))) == len(calm_records())


def test_rule_that_is_changed_behind_a_flag_changes_no_golden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later program trains the group that was dispatched last, in runs that have the flag."""
    later = Rule("latest-first", LOGIC_VERSION + 1, "the oldest of a deadline", "the latest one")
    old, asked = batching.by_deadline, list[bool]()

    def by_deadline(state: State) -> list[Group]:
        asked.append(is_rule_active(state.settings, later))
        return old(state)[::-1] if asked[-1] else old(state)

    monkeypatch.setattr(rules, "RULES", (*rules.RULES, later))
    monkeypatch.setattr(rules, "LOGIC_VERSION", later.since)
    monkeypatch.setitem(batching.STRATEGIES, "deadline", by_deadline)
    for golden in GOLDENS:
        assert problem(golden, disk_of_golden(golden)) == ""
    assert len(asked) > 100 and not any(asked)


def test_field_that_is_added_to_the_state_changes_no_golden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Digests in the log and of snapshots are those of a state that does not have it."""

    class LaterState(State, kw_only=True):
        mood: int = -1

    monkeypatch.setattr(machine, "State", LaterState)
    for golden in GOLDENS:
        assert problem(golden, disk_of_golden(golden)) == ""
