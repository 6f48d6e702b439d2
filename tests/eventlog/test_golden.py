"""Logs that were written once and kept still lead to the decisions that are in them."""

from __future__ import annotations

import msgspec
import pytest

from laminar.core import buffering, machine, rules
from laminar.core.rules import Rule, applies
from laminar.core.state import Group, State
from laminar.eventlog.reader import read_log, scan
from laminar.eventlog.record import EventRecord
from laminar.eventlog.restore import restore
from laminar.events import codec
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.events import ALL_EVENTS
from tools.rows.golden import Golden, disk_of_golden, manifest, problem

GOLDENS = manifest()
YOUNGER: set[type[Event]] = {
    ev.EventGivenUp,
    ev.TrajectoriesReleased,
    ev.CheckpointLoaded,
    ev.StepRedone,
    ev.RunResumed,
}


@pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])
def test_golden_log_replays_or_is_refused_as_written(golden: Golden) -> None:
    assert problem(golden, disk_of_golden(golden)) == ""


def test_every_event_is_in_a_golden_log() -> None:
    """But for those that are younger than the logs: kept logs are not written again."""
    found = {
        type(codec.decode_event(record.event))
        for golden in GOLDENS
        if golden.facts is not None
        for _, record in read_log(disk_of_golden(golden))
        if isinstance(record, EventRecord)
    }
    assert set(ALL_EVENTS) - found == YOUNGER


def test_changed_figure_is_noticed() -> None:
    """The check itself: a replay that comes to something else is told."""
    golden = next(g for g in GOLDENS if g.facts is not None)
    other = Golden(name=golden.name, what=golden.what, facts=None, refusal="never")
    assert "must be refused" in problem(other, disk_of_golden(golden))
    refused = next(g for g in GOLDENS if g.facts is None)
    wanted = Golden(name=refused.name, what=refused.what, facts=golden.facts)
    assert "refused:" in problem(wanted, disk_of_golden(refused))


def test_log_with_another_decision_is_restored_with_the_difference_and_its_end() -> None:
    """Who restores it can say what differs, and where the log ends."""
    altered = next(g for g in GOLDENS if g.name == "refused/altered_decision")
    disk = disk_of_golden(altered)
    restored = restore(disk)
    assert altered.refusal in str(restored.replay.difference)
    assert restored.tail == scan(disk)


def test_rule_that_is_changed_behind_a_flag_changes_no_golden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later program trains the group that was dispatched last, in runs that have the flag."""
    later = Rule("latest-first", 9, "the oldest group of a deadline", "the latest one")
    old, asked = buffering.by_deadline, list[bool]()

    def by_deadline(state: State) -> list[Group]:
        asked.append(applies(state.settings, later))
        return old(state)[::-1] if asked[-1] else old(state)

    monkeypatch.setattr(rules, "RULES", (*rules.RULES, later))
    monkeypatch.setattr(rules, "LOGIC_VERSION", later.since)
    monkeypatch.setitem(buffering.STRATEGIES, "deadline", by_deadline)
    for golden in GOLDENS:
        assert problem(golden, disk_of_golden(golden)) == ""
    assert len(asked) > 100 and not any(asked)


def test_field_that_is_added_to_the_state_changes_no_golden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Digests in the log and of snapshots are those of a state that does not have it."""

    class LaterState(State, kw_only=True):
        mood: int = -1
        moods: dict[str, int] = msgspec.field(default_factory=dict)

    monkeypatch.setattr(machine, "State", LaterState)
    for golden in GOLDENS:
        assert problem(golden, disk_of_golden(golden)) == ""
