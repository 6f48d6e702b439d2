"""Stall detection: a run in which work remains and nothing has moved for too long.

Reads   every event, the state after it; the table of waits (core/waits.py)
Gives   RunStalled, which is logged and names the awaited event and its owner

Pure. Events of actors move the run, except reports of trouble; so do more tokens, and the gauge of
a process that works on one order for long: passes of a model, bytes that it read, wrote or sent. A
wait that has not reached its deadline does not count as a stall: it is limited by a setting of the
user, or another process does the work. Only the work of COUNTED is awaited no longer than
`coordinator.stall_timeout_s`. A deadline that is set again and again excuses nothing: the wait must
have begun soon after the last movement. If nothing at all is awaited, the coordinator itself holds
the run up.

A coordinator that was paused has seen nothing move: its time begins again after that.
"""

from __future__ import annotations

from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.waits import Wait, list_waits
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Stamped, get_tag

WATCHED = (Phase.RUNNING, Phase.EXPORTING, Phase.FINAL_EVALUATION)
"""Phases in which work remains; a start and an end have their own deadlines."""
COUNTED = (
    get_tag(ev.StepCompleted),
    get_tag(ev.StepRepeated),
    get_tag(ev.CheckpointLoaded),
    get_tag(ev.CheckpointSaved),
    get_tag(ev.ModelExported),
    get_tag(ev.TrajectoryFinished),
)
"""Awaited events whose work is counted: passes and bytes of the trainer, tokens."""
TROUBLE = (ev.ActorFailed, ev.ActorLeft, ev.ProcessExited, ev.RelayLinked, ev.PublishSkipped)
"""Events of actors that move nothing."""
LOOKS = 60  #: checks in a stall's time
PAUSE_SHARE = 8  #: part of a stall's time without a turn after which the coordinator was paused


class StallDetector:
    """The time of the last movement of a run, by its clock."""

    def __init__(self, stall_ns: int, time_ns: int) -> None:
        self._stall_ns = stall_ns
        self._moved_ns = self._turn_ns = self._next_ns = time_ns

    def observe(self, stamped: Stamped, state: State) -> None:
        """Note an event that the core has handled."""
        if _is_movement(stamped, state):
            self._moved_ns = stamped.time_ns

    def judge(self, state: State, time_ns: int) -> ev.RunStalled | None:
        """Return the event for a run that stands still; it has as much time again after that."""
        paused = time_ns - self._turn_ns > self._stall_ns // PAUSE_SHARE
        self._turn_ns = time_ns
        if paused or state.run.phase not in WATCHED:
            self._moved_ns = time_ns
        idle_ns = time_ns - self._moved_ns
        if idle_ns < self._stall_ns or time_ns < self._next_ns:
            return None
        self._next_ns = time_ns + self._stall_ns // LOOKS
        waits = list_waits(state) or [_await_decision(state, time_ns)]
        wait = self._find_overdue(waits, time_ns)
        if wait is None:
            return None
        self._moved_ns = time_ns
        owner = state.members.actors.get(wait.owner)
        return ev.RunStalled(
            awaited=wait.event,
            owner=wait.owner,
            owner_incarnation=owner.incarnation if owner is not None else 0,
            waiter=wait.waiter,
            what=wait.what,
            idle_ms=idle_ns // 1_000_000,
        )

    def _find_overdue(self, waits: list[Wait], time_ns: int) -> Wait | None:
        """Return the wait that holds the run up; None if another one has time left."""
        counted = [wait for wait in waits if wait.event in COUNTED]
        others = [wait for wait in waits if wait.event not in COUNTED]
        if any(self._has_time(wait, time_ns) for wait in others):
            return None
        return next(iter(counted or others), None)

    def _has_time(self, wait: Wait, time_ns: int) -> bool:
        began = wait.since_ns <= self._moved_ns + self._stall_ns
        return began and wait.until_ns is not None and wait.until_ns > time_ns


def _await_decision(state: State, time_ns: int) -> Wait:
    """Return the wait of a run in which work remains, but no process has a command."""
    names = f"step {state.steps.chosen + 1}", "any command", COORDINATOR, "none is outstanding"
    return Wait(*names, time_ns, None, "the run ends")


def _is_movement(stamped: Stamped, state: State) -> bool:
    event = stamped.event
    if stamped.peer == COORDINATOR or isinstance(event, TROUBLE):
        return False
    if isinstance(event, ev.TokenProgress):
        replica = state.members.replicas.get(stamped.peer)
        return replica is not None and replica.progress_ns == stamped.time_ns
    return not isinstance(event, ev.TransferProblem) or event.num_bytes > 0
