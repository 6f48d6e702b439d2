"""Logs that were written once and kept still lead to the decisions that are in them."""

from __future__ import annotations

import pytest

from laminar.eventlog.reader import read_log, scan
from laminar.eventlog.record import EventRecord
from laminar.eventlog.restore import restore
from laminar.events import codec
from laminar.events.events import ALL_EVENTS
from tools.rows.golden import Golden, disk_of_golden, manifest, problem

GOLDENS = manifest()


@pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])
def test_golden_log_replays_or_is_refused_as_written(golden: Golden) -> None:
    assert problem(golden, disk_of_golden(golden)) == ""


def test_every_event_is_in_a_golden_log() -> None:
    found = {
        type(codec.decode_event(record.event))
        for golden in GOLDENS
        if golden.facts is not None
        for _, record in read_log(disk_of_golden(golden))
        if isinstance(record, EventRecord)
    }
    assert {event.__name__ for event in ALL_EVENTS} - {event.__name__ for event in found} == set()


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
