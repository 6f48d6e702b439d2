"""Check of how a run failed: its kind, subject and cause fit each other, and a fault or a limit.

Reads   the failure in the last state, the event in the log that it names, where faults have struck
Raises  Violation

Nothing here reads the sentence for people.
"""

from __future__ import annotations

from laminar.core.state.failures import Failure, FailureKind
from laminar.core.state.state import State
from laminar.core.steps import step_replay
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.eventlog.replay import stamped
from laminar.events import events as ev
from laminar.events.base import Event, Stamped
from laminar.names import exit_codes
from laminar.names.ids import Purpose
from tools.simulator.checks.safety import Checks
from tools.simulator.runtime.process import SimProcess
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World

_LOSSES: tuple[type[Event], ...] = (
    ev.ActorFailed, ev.ActorJoined, ev.ActorLeft, ev.HeartbeatLost, ev.NodeSilent,
    ev.ProcessExited, ev.RunResumed, ev.TimerFired,
)  # fmt: skip
_CAUSES: dict[FailureKind, tuple[type[Event], ...]] = {
    FailureKind.STOPPED: (ev.DrainRequested,),
    FailureKind.STOPPED_EARLY: (ev.DrainRequested,),
    FailureKind.NOT_STARTED: (ev.TimerFired,),
    FailureKind.NEVER_JOINED: (ev.ProcessExited,),
    FailureKind.PROCESS_FAILED: (ev.ActorFailed,),
    FailureKind.ENGINE_FAILS: (ev.ActorFailed,),
    FailureKind.OVERDUE: (ev.TimerFired,),
    FailureKind.NOT_PUBLISHED: (ev.TimerFired,),
    FailureKind.EXPORT_DIFFERS: (ev.WeightsPublished,),
    FailureKind.NO_CHECKPOINT: (ev.TrainerReady,),
    FailureKind.REWARD_FAILS: (ev.TrajectoryFailed, ev.TrajectoryRewarded),
    FailureKind.NO_SCORES: (ev.TrajectoryFailed, ev.TrajectoryRewarded),
    FailureKind.ENV_FAILS: (ev.TrajectoryFailed,),
    FailureKind.NO_VARIANCE: (Event,),  # whatever ended the last sibling of the last group
}
"""Of the other kinds, which are losses: _LOSSES."""
_STOPS = (FailureKind.STOPPED, FailureKind.STOPPED_EARLY)
_OF_REWARDS = (FailureKind.REWARD_FAILS, FailureKind.NO_SCORES)
_UNNAMED = (
    *_STOPS, *_OF_REWARDS, FailureKind.NO_VARIANCE, FailureKind.NOT_STARTED, FailureKind.OVERDUE,
    FailureKind.NOT_PUBLISHED,
)  # fmt: skip
"""Kinds whose cause names no process."""


def failure_has_a_reason(checks: Checks, state: State) -> None:
    """The cause is an event of the log about the subject, and a fault or a limit explains the
    kind."""
    failed, world = state.failed, checks.world
    if failed is None:
        return
    cause = _event(world, failed.cause)
    code = exit_codes.STOPPED_EARLY if failed.kind in _STOPS else exit_codes.FAILED
    what = f"exit {state.exit_code}, {failed!r}"
    if state.exit_code != code:
        raise Violation("failure_has_a_reason", f"{what}: another exit code belongs to it")
    if cause is None or not isinstance(cause.event, _CAUSES.get(failed.kind, _LOSSES)):
        raise Violation("failure_has_a_reason", f"{what}: its cause is {cause!r}")
    if failed.kind not in _UNNAMED and not _names(world, cause, failed.subject):
        raise Violation("failure_has_a_reason", f"{what}: {cause!r} is not about its subject")
    if not _explained(checks, failed, cause.event):
        raise Violation("failure_has_a_reason", f"{what}: no fault and no limit explains it")
    if failed.kind == FailureKind.NO_CHECKPOINT:
        checks.training.none_to_go_on_from(failed.sentence)


def _event(world: World, seq: int) -> Stamped | None:
    for _, record in read_log(world.coordinator.disk):
        if isinstance(record, EventRecord) and record.seq == seq:
            return stamped(record)
    return None


def _names(world: World, cause: Stamped, subject: str) -> bool:
    """The event is about this process, or about its node."""
    event = cause.event
    if isinstance(event, ev.RunResumed):
        return True  # it is about all of them
    process = world.processes.get(subject)
    names = {subject} if process is None else {subject, process.node}
    said = {cause.peer, *(getattr(event, field, "") for field in ("actor", "name", "node"))}
    timer = getattr(event, "timer", "")
    return not names.isdisjoint(said) or any(name in timer.split(":") for name in names)


def _explained(checks: Checks, failed: Failure, event: Event) -> bool:
    world = checks.world
    if failed.kind in _STOPS:
        return True  # the user asked, as the cause says
    if failed.kind in _OF_REWARDS:
        return _rewards_failed(world)
    if failed.kind == FailureKind.NO_VARIANCE:
        return _found_no_variance(checks)
    if failed.kind == FailureKind.BATCH_DEADLY:
        return world.processes[failed.subject].boot >= step_replay.DEATHS_MAX
    return any(world.faults.explains(process) for process in _subjects(world, failed))


def _subjects(world: World, failed: Failure) -> list[SimProcess]:
    """The process of this name, those of these roles, or, of first weights, who makes them."""
    named = world.processes.get(failed.subject)
    if named is not None:
        return [named]
    roles = set(failed.subject.split(", "))
    found = [process for process in world.processes.values() if process.role in roles]
    return found or [p for p in world.processes.values() if p.role in ("trainer", "relay")]


def _found_no_variance(checks: Checks) -> bool:
    """As many groups ended so as the limit has, or no batch was ever trained."""
    settings, found = checks.world.scenario.settings, checks.prompts.groups_ended_as("no-variance")
    limit = settings.filter_batches * settings.groups_per_step
    return 0 < limit <= found or (found > 0 and not checks.training.book)


def _rewards_failed(world: World) -> bool:
    """The store has as many bad ones as it takes at least."""
    settings = world.scenario.settings
    batch = settings.groups_per_step * settings.group_size
    trained = [row for row in world.rows.values() if row.purpose == Purpose.TRAIN]
    lost = sum(row.end_reason == "reward-worker-lost" for row in trained)
    failed = lost + sum(row.reward_reason not in (None, "ok") for row in trained)
    unscored = sum(row.end_reason == "unscored" for row in trained)
    return failed * 1000 > settings.max_error_permille * batch or unscored >= 4 * batch
