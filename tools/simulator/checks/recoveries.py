"""Check failures_recover: each failure has a possible cause, and recoveries meet their deadline.

Reads   what is decided, the state that it leads to; the failure of the run, and the log
Raises  Violation

A failure is that of a process, of a load, of a trajectory that starts over, or of the run. Each
names a logged event whose kind can cause it; the check does not ask which fault struck what. After
the faults each recovery completes within the longest deadline that applies. Deadlines are in log
time, which stands still while no coordinator runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from laminar.core.context import RESTART_TIMEOUT_MS
from laminar.core.loading import PULL_TIMEOUT_MS
from laminar.core.state import keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.versions.broadcast import RECEIVE_TIMEOUT_MS
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.eventlog.replay import decode_stamped
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Settings, Stamped
from tools.simulator.coverage import kind_of
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import MS, SECOND
from tools.simulator.world import World

NAME = "failures_recover"
PROCESS, LOAD, WORK, RESTART = "process", "load", "work", "restart"
_LOST = ("ActorFailed", "ActorJoined", "ActorLeft", "HeartbeatLost", "ProcessExited", "RunResumed")
_CAUSES = {
    PROCESS: (*_LOST, "timer:command:restart", "timer:command:stop"),
    LOAD: ("WeightsRejected",),
    WORK: (*_LOST, "timer:batch-timeout", "timer:command:release", "timer:command:restart",
           "TurnRequested", "VersionMissing", "WeightsRejected"),
    RESTART: ("HeartbeatLost", "RunStalled", "WeightsPublished", "WeightsReceived",
              "WeightsRejected",
              "timer:command:forward", "timer:command:pull", "timer:command:score",
              "timer:progress", "timer:receive"),
}  # fmt: skip
"""Event kinds that can end a process, fail a load, make a trajectory start over (the end of a turn
takes it from its replica), and restart a process."""
_LOSS = (*_LOST, "NodeSilent", "timer:command:restart", "timer:rejoin")
_REWARDED = ("TrajectoryFailed", "TrajectoryRewarded")
_CAUSES_OF_RUN = {
    FailureKind.STOPPED: ("DrainRequested",),
    FailureKind.STOPPED_EARLY: ("DrainRequested",),
    FailureKind.NOT_STARTED: ("timer:start",),
    FailureKind.NEVER_JOINED: ("ProcessExited",),
    FailureKind.USER_MISTAKE: ("ActorFailed", "TrainerReady"),
    FailureKind.PROCESS_FAILED: ("ActorFailed",),
    FailureKind.ENGINE_FAILS: ("ActorFailed",),
    FailureKind.NOT_PUBLISHED: ("timer:weights", "timer:command:publish"),
    FailureKind.EXPORT_DIFFERS: ("WeightsPublished",),
    FailureKind.NON_FINITE: ("StepCompleted",),
    FailureKind.STALLED: ("RunStalled",),
    FailureKind.NO_CHECKPOINT: ("TrainerReady",),
    FailureKind.REWARD_FAILS: _REWARDED,
    FailureKind.NO_SCORES: _REWARDED,
    FailureKind.ENV_FAILS: ("TrajectoryFailed",),
}
"""Causes of a run's failure; other kinds have a loss, OVERDUE any timer, and NO_VARIANCE whatever
ended the last sibling."""
_OVER = (Phase.ENDING, Phase.STOPPING, Phase.ENDED)
LATE_NS = 5 * SECOND  #: longest time from a deadline to the turn in which it takes effect


class Opened(NamedTuple):
    """Recovery that has not completed."""

    seq: int  #: event that made it necessary
    since_ns: int  #: log time
    cause: str  #: kind of that event; empty: unknown since a coordinator restarted


class Recoveries:
    """Open recoveries of one run, by what has failed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[str, dict[str, Opened]] = {PROCESS: {}, LOAD: {}, WORK: {}}
        self._attempts: dict[str, int] = {}  #: latest attempts, by trajectory
        self._dead: dict[str, None] = {}  #: dead processes
        self._membership = (-1, -1)
        self._healed_ns = -1  #: log time

    def observe(self, stamped: Stamped, commands: Iterable[Command], state: State) -> None:
        """Check an event that the coordinator has handled."""
        cause = kind_of(stamped.event)
        self._attribute(cause, commands)
        for name in self._newly_dead(state):
            self._can_cause(PROCESS, name, cause)
        opened = Opened(stamped.seq, stamped.time_ns, cause)
        self._keep(WORK, state.work.lost, opened)
        self._await_process(stamped.event, commands, state, opened)
        self._await_load(stamped, state, opened)
        self._complete_in_time(stamped, state)

    def replayed(self, stamped: Stamped, state: State) -> None:
        """Note an event that a new coordinator replays; the old one may not have handled it."""
        opened = Opened(stamped.seq, stamped.time_ns, "")
        self._keep(WORK, state.work.lost, opened)
        if _has_failed_to_load(state, stamped.peer):
            self._open[LOAD].setdefault(stamped.peer, opened)

    def take_back(self, seq: int) -> None:
        """Forget what came after this event: it was lost with its coordinator."""
        self._membership = (-1, -1)
        for kind, found in self._open.items():
            self._open[kind] = {n: opened for n, opened in found.items() if opened.seq <= seq}

    # --- causes -------------------------------------------------------------------------------

    def _attribute(self, cause: str, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                self._can_cause(RESTART, command.actor, cause)
            elif isinstance(command, cmd.GenerateTrajectory):
                name, before = command.trajectory_id, self._attempts.get(command.trajectory_id)
                self._attempts[name] = command.attempt
                lost = self._open[WORK].get(name)
                if before is not None and command.attempt > before:
                    self._can_cause(WORK, name, cause if lost is None else lost.cause)

    def _newly_dead(self, state: State) -> list[str]:
        members = state.members
        membership = (indexes_of(state).num_alive, members.next_incarnation)
        if membership == self._membership:
            return []
        known, came_back = self._dead, self._membership == (-1, -1)
        self._membership = membership
        self._dead = {actor.name: None for actor in members.actors.values() if not actor.alive}
        return [] if came_back else [name for name in self._dead if name not in known]

    def _can_cause(self, kind: str, subject: str, cause: str) -> None:
        if cause and cause not in _CAUSES[kind]:
            raise Violation(NAME, f"{kind} {subject}: {cause} causes no such failure", subject)

    # --- recoveries ---------------------------------------------------------------------------

    def _keep(self, kind: str, failed: Iterable[str], opened: Opened) -> None:
        """Keep exactly these open: they have failed and not recovered."""
        known = self._open[kind]
        if known or failed:
            self._open[kind] = {name: known.get(name, opened) for name in failed}

    def _await_process(
        self, event: Event, commands: Iterable[Command], state: State, opened: Opened
    ) -> None:
        """Track the processes that are being restarted.

        One leaves when it has joined, its node is lost, or the timer that waits for it fires.
        """
        awaited = self._open[PROCESS]
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                awaited[command.actor] = opened
        if isinstance(event, ev.ProcessExited) and event.actor in state.members.actors:
            awaited.pop(event.actor, None)
            if event.restarting and event.actor in self._dead:
                awaited[event.actor] = opened
        elif isinstance(event, ev.ActorJoined):
            awaited.pop(event.name, None)
        elif isinstance(event, ev.RunResumed):
            awaited.clear()
        elif isinstance(event, ev.TimerFired):
            awaited.pop(event.timer.rpartition(":")[2], None)
        for name in [
            n for n in awaited if not state.members.is_actor_alive(state.members.actors[n].node)
        ]:
            del awaited[name]

    def _await_load(self, stamped: Stamped, state: State, opened: Opened) -> None:
        """Track replicas whose load has failed, until they have loaded or are restarted."""
        failed, name = self._open[LOAD], stamped.peer
        if name not in failed and _has_failed_to_load(state, name):
            self._can_cause(LOAD, name, opened.cause)
            failed[name] = opened
        for name in [n for n in failed if not _has_failed_to_load(state, n)]:
            del failed[name]

    def _complete_in_time(self, stamped: Stamped, state: State) -> None:
        if state.run.phase in _OVER or not self._world.faults.healed:
            return
        if self._healed_ns < 0:
            self._healed_ns = stamped.time_ns
        for kind, found in self._open.items():
            if not found:
                continue
            name, oldest = min(found.items(), key=lambda item: item[1].since_ns)
            since_ns = max(oldest.since_ns, self._healed_ns)
            if stamped.time_ns - since_ns > _longest_ms(kind, state.settings) * MS + LATE_NS:
                took_s = (stamped.time_ns - since_ns) / SECOND
                what = f"{kind} {name} has not recovered for {took_s:.0f} s, since {oldest!r}"
                raise Violation(NAME, what, name)

    # --- the run ------------------------------------------------------------------------------

    def run_failed_for_a_cause(self, state: State) -> None:
        """Check that the failure of the run names a logged event of a kind that leads to it."""
        failed = state.run.failed
        if failed is None or failed.kind == FailureKind.NO_VARIANCE:
            return
        cause = next((kind_of(s.event) for s in self._logged() if s.seq == failed.cause), "")
        overdue = failed.kind == FailureKind.OVERDUE and cause.startswith("timer:")
        if not overdue and cause not in _CAUSES_OF_RUN.get(failed.kind, _LOSS):
            raise Violation(NAME, f"the run: {cause or 'nothing in the log'} causes no {failed!r}")

    def _logged(self) -> Iterable[Stamped]:
        for _, record in read_log(self._world.coordinator.disk):
            if isinstance(record, EventRecord):
                yield decode_stamped(record)


def _has_failed_to_load(state: State, name: str) -> bool:
    replica = state.members.replicas.get(name)
    failed = replica is not None and replica.failed_loads > 0
    return failed and keys.restart_key(name) not in state.orders.commands


def _longest_ms(kind: str, settings: Settings) -> int:
    """Return the longest deadline on the way of this recovery."""
    start_ms = RESTART_TIMEOUT_MS + settings.start_timeout_ms + settings.engine_start_ms
    if kind == PROCESS:
        return start_ms
    transfer_ms = max(PULL_TIMEOUT_MS, RECEIVE_TIMEOUT_MS)
    return start_ms + transfer_ms + (settings.resume_timeout_ms if kind == WORK else 0)
