"""The cells of the table of events: phases, senders and statuses that must be tried.

Reads   the declarations of events
Gives   Cell, StatusCell, CELLS, STATUS_CELLS; the outcome of each: tests/core/event_table.py
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Event
from laminar.names.roles import ACTOR_ROLES

PHASES = (
    "starting", "running", "exporting", "final-evaluation", "ending", "stopping", "ended",
)  # fmt: skip
LIVENESS = ("alive", "fenced", "unknown")
STATUSES = (
    "dispatched", "running", "generated", "rewarded", "releasing", "lost", "ending", "waiting",
)  # fmt: skip


class Cell(NamedTuple):
    """An entry of the table of events."""

    phase: str
    event: type[Event]
    role: str
    liveness: str


class StatusCell(NamedTuple):
    """An entry of the table of trajectories."""

    status: str
    event: type[Event]


TRAJECTORY_EVENTS = (
    ev.TrajectoryStarted, ev.TrajectoryFinished, ev.TrajectoryFailed, ev.TrajectoryRewarded,
    ev.TurnRequested,
)  # fmt: skip
#: When a run has ended, no process is alive.
CELLS = {
    *itertools.starmap(Cell, itertools.product(PHASES[:-1], ev.ALL_EVENTS, ACTOR_ROLES, LIVENESS)),
    *itertools.starmap(Cell, itertools.product(PHASES, ev.ALL_EVENTS, ACTOR_ROLES, LIVENESS[1:])),
    *(Cell(phase, event, COORDINATOR, "alive") for phase in PHASES for event in ev.ALL_EVENTS),
}
#: With sessions no trajectory is generated, and one that is released is seldom met.
STATUS_CELLS = {*itertools.starmap(StatusCell, itertools.product(STATUSES, TRAJECTORY_EVENTS))} - {
    StatusCell(status, ev.TurnRequested) for status in ("generated", "releasing")
}
