"""Events of a replay as the parts of the collector receive them: with commands and state.

Reads   nothing
Gives   Happening; describe_event, abbreviate_event
"""

from __future__ import annotations

from functools import cached_property

from laminar.analysis.facts.trajectory_history import Change
from laminar.analysis.log.display import display_fields
from laminar.analysis.log.event_clock import Moment
from laminar.core.state.keys import TimerKind
from laminar.core.state.state import State
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped

FREQUENT_EVENTS = (
    ev.TokenProgress,
    ev.TrajectoryStarted,
    ev.TrajectoryFinished,
    ev.TrajectoryRewarded,
    ev.TurnRequested,
    ev.TrajectoriesEnded,
    ev.WeightsLoaded,
)
"""Events that change no process, and no replica but those that they, or their commands, name."""

STEADY_EVENTS = (
    *FREQUENT_EVENTS,
    ev.TrajectoriesReleased,
    ev.StepCompleted,
    ev.WeightsPublished,
    ev.WeightsReceived,
    ev.RelayLinked,
    ev.TransferProblem,
    ev.CheckpointSaved,
)
"""Events that begin and end no process, and change no relay but the one that reports them."""

STEADY_TIMERS = (TimerKind.REPACK, TimerKind.PROGRESS, TimerKind.RESUME, TimerKind.BATCH_TIMEOUT)

NAMING_FIELDS = (
    "trajectory", "actor", "name", "node", "timer", "version", "step", "code", "reason",
)  # fmt: skip
"""Fields that distinguish events of one type."""


class Happening:
    """Event with its commands, the state after it, and its changes to trajectories."""

    def __init__(
        self,
        now: Moment,
        stamped: Stamped,
        commands: list[Command],
        state: State,
        changes: list[Change],
    ) -> None:
        self.now, self.stamped, self.event = now, stamped, stamped.event
        self.commands, self.state, self.changes = commands, state, changes
        self.is_frequent = isinstance(stamped.event, FREQUENT_EVENTS)
        self.is_steady = _is_steady(stamped.event)

    @cached_property
    def cause(self) -> str:
        """Description of the event by its naming fields and its sender."""
        return describe_event(self.stamped)


def _is_steady(event: Event) -> bool:
    """Return whether an event begins and ends no process."""
    if isinstance(event, ev.TimerFired):
        return event.timer.partition(":")[0] in STEADY_TIMERS
    return isinstance(event, STEADY_EVENTS)


def describe_event(stamped: Stamped) -> str:
    """Describe an event by its naming fields and its sender."""
    sender = "" if stamped.peer == COORDINATOR else f" of {stamped.peer}"
    return f"{abbreviate_event(stamped.event)}{sender}"


def abbreviate_event(event: Event) -> str:
    """Return an event's tag and its naming fields; `laminar log dump` shows all of them."""
    fields = display_fields(event)
    named = [
        f"{key}={fields[key]}" for key in NAMING_FIELDS if fields.get(key) not in (None, "", "ok")
    ]
    return " ".join([str(fields["type"]), *named])
