"""Coverage marks: rare paths that a swarm of runs must pass through.

Reads   what an observer sees: events, commands, the state, faults, answers of the store
Gives   counts by name; EXPECTED, the names of all marks, made from the product's own tables

The product knows nothing of marks, so they cost it nothing and cannot be forgotten there: a new
event, transition or command makes a new mark by itself, and a mark that no run hits is a path that
no simulation tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.core.machine import HANDLING
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import TRAJECTORY_TRANSITIONS
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.events.reasons import DropReason

_MOVE_NAMES = {
    (before, after): f"move:{before}-{trigger}"
    for (before, trigger), after in TRAJECTORY_TRANSITIONS.items()
}

DROP_REASONS = (
    "batch-timeout", "end-of-data", "mismatch", "no-variance", "quarantined", "replica-lost",
    "restarted", "reward-worker-lost", "run-ended", "store-refused", "too-few-scored", "unscored",
)  # fmt: skip
IGNORED_REASONS = (
    "fenced", "late", "old-incarnation", "old-placement", "old-process", "repeat",
    "unusable-proposal",
)  # fmt: skip
TIMERS = (
    "batch-timeout", "command:forward", "command:propose", "command:pull", "command:release",
    "command:restart", "command:score", "command:stop", "progress", "receive", "rejoin", "repack",
    "resume", "start",
)  # fmt: skip
"""Timers that end a wait. Those that only a process can miss that the run needs are left out, since
the run then ends."""
OUTSIDE = (
    "coordinator:diskerror-in-a-turn",
    "coordinator:died-at-its-start",
    "coordinator:killed-between-turns",
    "coordinator:powercut-in-a-turn",
    "disk:power-cut-all",
    "disk:power-cut-none",
    "disk:power-cut-prefix",
    "disk:power-cut-reordered",
    "disk:power-cut-torn",
    "fork:begun",
    "log:rotated",
    "log:taken-over",
    "log:torn-tail",
    "relay:commit-of-a-dead-relays-slot",
    "relay:cut-through",
    "relay:lease-revoked",
    "relay:pin-of-a-version-not-here",
    "relay:resumed",
    "relay:stale-predecessor",
    "rollout:not-leased",
    "rollout:not-stored",
    "session:command-repeated",
    "session:refused",
    "store:append-fenced",
    "store:finish-fenced",
    "store:open-generated-move",
    "store:open-open-create",
    "store:open-open-move",
    "store:open-open-restart",
    "store:payload-removed",
    "store:reward-fenced",
)

EXPECTED: tuple[str, ...] = (
    *(f"event:{event.__name__}" for event in HANDLING),
    *_MOVE_NAMES.values(),
    *(f"dropped:{reason}" for reason in DROP_REASONS),
    *(f"ignored:{reason}" for reason in IGNORED_REASONS),
    *(f"timer:{kind}" for kind in TIMERS),
    *OUTSIDE,
)


def kind_of(event: Event) -> str:
    """Return the kind of an event; for a timer its own kind, without the name that it concerns."""
    if not isinstance(event, ev.TimerFired):
        return type(event).__name__
    kind, subject = keys.parse_timer(event.timer)
    command = subject.partition(":")[0]
    return f"timer:{kind}:{command}" if kind == keys.TimerKind.COMMAND else f"timer:{kind}"


class Coverage:
    """Number of times that each path was taken."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._statuses: dict[str, TrajectoryStatus] = {}

    def hit(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def merge(self, other: Mapping[str, int]) -> None:
        for name, count in other.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def missing(self) -> list[str]:
        """Return the expected marks that were never hit."""
        return [name for name in EXPECTED if name not in self.counts]

    def observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Count the marks of an event that was handled."""
        kind = type(stamped.event).__name__
        self.hit(f"event:{kind}")
        for command in commands:
            self.hit(f"{kind} -> {type(command).__name__}")
        if isinstance(stamped.event, ev.TimerFired):
            self.hit(kind_of(stamped.event))
        self._look_at(getattr(stamped.event, "trajectory_id", ""), state)
        for command in commands:
            self._look_at(getattr(command, "trajectory_id", ""), state)
            for ending in getattr(command, "endings", ()):
                self._look_at(ending.trajectory_id, state)
            if isinstance(command, cmd.ReleaseTrajectories):
                for item in command.items:
                    self._look_at(item.trajectory_id, state)
        for trajectory in reversed(state.work.lost):  # the latest first
            if self._statuses.get(trajectory) == TrajectoryStatus.LOST:
                break
            self._look_at(trajectory, state)

    def _look_at(self, trajectory_id: str, state: State) -> None:
        """Count the transition that a trajectory has made since the last look."""
        found = state.work.trajectories.get(trajectory_id)  # type: ignore[call-overload]
        if found is None:
            return
        before = self._statuses.get(trajectory_id)
        self._statuses[trajectory_id] = found.status
        name = _MOVE_NAMES.get((before, found.status)) if before else None
        if name is not None:
            self.hit(name)

    def finish(self, state: State) -> None:
        """Count the marks that the state itself has gathered over the run."""
        for reason in state.work.ledger.trajectories.dropped:
            self.hit(f"dropped:{reason}")
        for reason in state.work.ledger.tokens.dropped:
            if reason == DropReason.RESTARTED:
                self.hit(f"dropped:{reason}")
        for name in state.run.ignored:
            self.hit(f"ignored:{name.partition(': ')[2]}")
