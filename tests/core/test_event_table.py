"""Every event in every phase from every sender: handled, ignored with a reason, or quiet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from laminar.core.context import Context
from laminar.core.machine import HANDLING
from laminar.events import events as ev
from tests.core.event_table import Verdicts, try_out
from tools.kit.event_cells import CELLS, STATUS_CELLS, TRAJECTORY_EVENTS, Cell, StatusCell

SITUATIONS = 80


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return try_out(SITUATIONS)


def test_every_cell_has_a_verdict(verdicts: Verdicts) -> None:
    """That each verdict is a legal one is checked while it is given."""
    assert not (CELLS | STATUS_CELLS) - set(verdicts)


def test_only_the_living_and_the_right_senders_are_heard(verdicts: Verdicts) -> None:
    for cell, found in verdicts.items():
        if not isinstance(cell, Cell) or cell.event is ev.ActorJoined:
            continue
        if cell.liveness != "alive" or cell.role not in ev.REPORTED_BY[cell.event]:
            assert set(found) == {"ignored"}, (cell, found)


def test_every_event_is_handled_somewhere(verdicts: Verdicts) -> None:
    """A table in which everything is ignored would be complete, too."""
    handled: Counter[type[ev.Event]] = Counter()
    for cell, found in verdicts.items():
        handled[cell.event] += found["handled"]
    assert [kind for kind in ev.ALL_EVENTS if not handled[kind]] == []


def test_trajectories_follow_their_table(verdicts: Verdicts) -> None:
    """Seen from outside: which event about a trajectory of which status may change anything."""
    started, finished, failed, rewarded, requested = TRAJECTORY_EVENTS
    legal = {
        started: {"dispatched", "releasing"},
        finished: {"dispatched", "running", "releasing"},
        failed: {"dispatched", "running", "generated", "releasing", "lost", "waiting"},
        rewarded: {"generated", "waiting"},
        requested: {"waiting"},
    }
    for cell, found in verdicts.items():
        if isinstance(cell, StatusCell):
            assert (found["handled"] > 0) == (cell.status in legal[cell.event]), (cell, found)


def vanishing(ctx: Context, event: ev.PublishSkipped) -> None:
    """Neither handled nor counted."""


def trusting(ctx: Context, event: ev.PublishSkipped) -> None:
    """Believes any number."""
    ctx.state.versions.next, ctx.state.versions.newest = 0, event.version


@pytest.mark.parametrize("planted", [vanishing, trusting])
def test_a_silent_or_trusting_handler_is_found(
    planted: Callable[[Context, ev.PublishSkipped], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = HANDLING[ev.PublishSkipped]._replace(handler=planted)
    monkeypatch.setitem(HANDLING, ev.PublishSkipped, bad)
    with pytest.raises(AssertionError):
        try_out(SITUATIONS)
