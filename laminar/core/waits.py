"""The table of waits: who waits for which event, from whom, since when, and until when.

Reads   state.orders, replicas, the phase of the run
Gives   Wait; list_waits, all waits of a state; list_awaited_processes, the lost ones with time to
        return; is_owner_restartable

Pure. Commands and timers are the waits of the coordinator. What happens at a deadline is decided in
core/timers.py; here are the words for it. Commands of one kind to one process are one wait: a
replica may be ordered to generate a thousand responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from laminar.core.members import lifecycle
from laminar.core.state import keys
from laminar.core.state.indexes import live_actor, master_relay
from laminar.core.state.keys import CommandKey, OutstandingCommand, TimerKind
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.transitions import UNFINISHED
from laminar.core.steps import batching, step_replay
from laminar.core.versions import broadcast, publishing
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, get_tag
from laminar.names.ids import Purpose, TrajectoryId
from laminar.names.roles import ROLE_TABLE, Role

COORDINATOR = str(Role.COORDINATOR)
MS = 1_000_000  #: ns


class Wait(NamedTuple):
    """A wait. Times are those of the run, as in `Stamped.time_ns`."""

    waiter: str  #: actor, "coordinator", "step 12" or "evaluation"
    event: str  #: kind of the awaited event
    owner: str  #: actor that must act for it, or the role of one that has not joined
    what: str  #: the awaited thing, in a few words
    since_ns: int
    until_ns: int | None  #: deadline; None: there is none, or it is suspended
    then: str  #: result at the deadline
    cause: int | None = None  #: seq of the event that began it
    key: str = ""  #: the user's setting that limits it; empty: a limit of the program


def list_waits(state: State) -> list[Wait]:
    """Return all waits, oldest first."""
    if state.run.phase == Phase.ENDED:
        return []
    orders: dict[tuple[type[Command], str], list[tuple[int | None, OutstandingCommand]]] = {}
    found: list[Wait] = []
    for name, due_ns in state.orders.timers.items():
        kind, subject = keys.parse_timer(name)
        if kind == TimerKind.COMMAND:
            order = state.orders.commands[CommandKey(subject)]
            same = orders.setdefault((type(order.command), order.command.to), [])
            same.append((due_ns, order))
        elif kind in _TIMERS:
            found += _TIMERS[kind](state, subject, due_ns)
    first = state.orders.commands.get(keys.PUBLISH)
    if first is not None and keys.deadline_timer(keys.PUBLISH) not in state.orders.timers:
        due = state.orders.timers.get(keys.START)  # the first weights have the time of the start
        orders[cmd.PublishWeights, first.command.to] = [(due, first)]
    found += [_describe_orders(state, same) for same in orders.values()]
    return sorted(found, key=lambda wait: wait.since_ns)


def list_awaited_processes(state: State) -> list[str]:
    """Return the lost processes that still have time to come back."""
    timers = state.orders.timers
    return [
        a.name
        for a in state.members.actors.values()
        if not a.alive and keys.rejoin_timer(a.name) in timers
    ]


def is_owner_restartable(state: State, command: Command) -> bool:
    """Return whether a process that is late with this order is restarted, or ends the run."""
    kinds = (cmd.EndTrajectories, cmd.StartSession, cmd.ScoreTrajectories)
    return (
        command.to in state.members.replicas
        or isinstance(command, kinds)
        or step_replay.may_be_lost(state, command.to)
    )


# --- commands ---------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """The event that a command asks for."""

    event: type[Event]
    what: Callable[[list[Any]], str]  #: from the commands of one kind to one process
    key: str = ""
    then: Callable[[Any], str] | None = None  #: None: its process is restarted, or the run ends


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count_items(commands: list[Any]) -> str:
    return _count(sum(len(c.items) for c in commands), "response")


def _name_checkpoint(commands: list[Any]) -> str:
    return f"the checkpoint of step {commands[0].step}"


def _name_version(commands: list[Any]) -> str:
    return f"version {commands[0].version}"


def _name_restarts(commands: list[Any]) -> str:
    return f"the restart of {', '.join(c.actor for c in commands)}: {commands[0].reason}"


# fmt: off
_ANSWERS: dict[type[Command], _Answer] = {
    cmd.StopActor: _Answer(ev.ActorLeft, lambda c: "its end", then=lambda c: "it counts as ended"),
    cmd.RestartActor: _Answer(
        ev.ProcessExited, _name_restarts, then=lambda c: f"{c.actor} is given up"),
    cmd.PublishWeights: _Answer(ev.WeightsPublished, _name_version),
    cmd.TrainStep: _Answer(
        ev.StepCompleted, lambda c: f"a batch of {_count(len(c[0].trajectories), 'response')}"),
    cmd.LoadCheckpoint: _Answer(ev.CheckpointLoaded, _name_checkpoint),
    cmd.RepeatStep: _Answer(ev.StepRepeated, lambda c: f"step {c[0].step_index + 1}, repeated"),
    cmd.ExportModel: _Answer(ev.ModelExported, lambda c: "the exported model"),
    cmd.SaveCheckpoint: _Answer(ev.CheckpointSaved, _name_checkpoint),
    cmd.ForwardWeights: _Answer(
        ev.RelayLinked, lambda c: f"the connection to {c[0].successor or 'no relay'}",
        then=lambda c: f"{c.successor or c.to} is restarted"),
    cmd.PullWeights: _Answer(ev.WeightsLoaded, _name_version),
    cmd.StartSession: _Answer(
        ev.TurnRequested, lambda c: _count(len(c), "session"), "env.turn_timeout_s"),
    cmd.ScoreTrajectories: _Answer(
        ev.TrajectoryRewarded, lambda c: f"the reward of {_count_items(c)}", "reward.timeout_s"),
    cmd.ReleaseTrajectories: _Answer(
        ev.TrajectoriesReleased, _count_items, "repack.release_timeout_ms",
        lambda c: "they continue from the tokens in the store"),
    cmd.EndTrajectories: _Answer(
        ev.TrajectoriesEnded,
        lambda c: f"the ends of {_count(sum(len(x.endings) for x in c), 'response')}",
        "coordinator.disk_full_timeout_s"),
    cmd.ProposeBatch: _Answer(
        ev.BatchProposed, lambda c: "a batch", then=lambda c: "the batch is chosen by deadline"),
}
# fmt: on
"""What each command waits for; generations are watched by the progress of their replica."""


def _describe_orders(state: State, same: list[tuple[int | None, OutstandingCommand]]) -> Wait:
    """Return the wait for commands of one kind to one process; the first deadline counts."""
    oldest = min((order for _, order in same), key=lambda o: o.command_id)
    command, answer = oldest.command, _ANSWERS[type(oldest.command)]
    until_ns = min((due for due, _ in same if due is not None), default=None)
    restarts = is_owner_restartable(state, command)
    then = f"{command.to} is restarted" if restarts else "the run ends"
    then = answer.then(command) if answer.then is not None else then
    waiter, what = _name_waiter(state, command), answer.what([o.command for _, o in same])
    names, times = (waiter, get_tag(answer.event), command.to, what), (oldest.since_ns, until_ns)
    return Wait(*names, *times, then, oldest.cause, answer.key)


def _name_waiter(state: State, command: Command) -> str:
    if isinstance(command, (cmd.TrainStep, cmd.RepeatStep)):
        return f"step {command.step_index + 1}"
    if isinstance(command, (cmd.StartSession, cmd.ScoreTrajectories)):
        return _name_step(state, command.purpose)
    return _name_step(state) if isinstance(command, cmd.ProposeBatch) else COORDINATOR


def _name_step(state: State, purpose: Purpose = Purpose.TRAIN) -> str:
    return f"step {state.steps.chosen + 1}" if purpose == Purpose.TRAIN else "evaluation"


# --- timers -----------------------------------------------------------------------------------


_READY: dict[Role, type[Event]] = {
    Role.STORE: ev.DataLoaded,
    Role.RELAY: ev.RelayReady,
    Role.TRAINER: ev.TrainerReady,
    Role.ROLLOUT: ev.ReplicaReady,
    Role.AGENT: ev.AgentReady,
}
"""Events with which a process that has joined is ready."""
START_KEY = "coordinator.start_timeout_s"


def _list_start(state: State, subject: str, due_ns: int) -> Iterator[Wait]:
    since_ns = due_ns - state.settings.start_timeout_ms * MS
    for role in lifecycle.find_missing_roles(state):
        actor = live_actor(state, role)
        event = get_tag(_READY[role] if actor is not None else ev.ActorJoined)
        names = COORDINATOR, event, actor.name if actor is not None else role
        yield Wait(*names, "the start of the run", since_ns, due_ns, "the run ends", key=START_KEY)


def _list_weights(state: State, subject: str, due_ns: int) -> Iterator[Wait]:
    relay, made = master_relay(state), publishing.last_made(state)
    owner = relay.name if relay is not None else Role.RELAY
    since_ns = due_ns - publishing.PUBLISH_TIMEOUT_MS * MS
    what, event = f"version {made} from the trainer", get_tag(ev.WeightsPublished)
    yield Wait(COORDINATOR, event, owner, what, since_ns, due_ns, "the run ends")


def _list_batch(state: State, subject: str, due_ns: int) -> Iterator[Wait]:
    group = batching.find_awaited_group(state)
    if group is None:
        return
    members = [state.work.trajectories[m] for m in group.members if m in state.work.trajectories]
    late = next((t for t in members if t.status in UNFINISHED), members[0])
    owner = state.work.sessions.get(late.id, "") or late.replica or Role.ROLLOUT
    names = _name_step(state), get_tag(ev.TrajectoryRewarded), owner
    what = f"group {group.id}, the first that the batch lacks"
    since_ns = due_ns - state.settings.batch_timeout_ms * MS
    then = "its late responses move to another replica, at the third time they are dropped"
    yield Wait(*names, what, since_ns, due_ns, then, key="trainer.batch_timeout_s")


def _list_resume(state: State, subject: str, due_ns: int) -> Iterator[Wait]:
    trajectory = state.work.trajectories[TrajectoryId(subject)]
    loading = (r.name for r in state.members.live_replicas() if r.loading)
    waiter = _name_step(state, state.work.groups[trajectory.group].purpose)
    names = waiter, get_tag(ev.WeightsLoaded), next(loading, str(Role.ROLLOUT))
    what = f"a replica with version {trajectory.version} for {trajectory.id}, which lost its own"
    since_ns, key = due_ns - state.settings.resume_timeout_ms * MS, "recovery.resume_timeout_ms"
    yield Wait(*names, what, since_ns, due_ns, "it starts over", key=key)


def _list_progress(state: State, name: str, due_ns: int) -> Iterator[Wait]:
    """Yield the wait for an engine that starts, or for the next token of one that runs."""
    replica, actor = state.members.replicas.get(name), state.members.actors[name]
    then = f"{name} is restarted"
    if replica is None and not actor.ready:
        since_ns, event = due_ns - state.settings.engine_start_ms * MS, get_tag(_READY[actor.role])
        times, key = (since_ns, due_ns), "rollout.start_timeout_s"
        yield Wait(COORDINATOR, event, name, "its start", *times, then, key=key)
    if replica is None or not replica.running:
        return
    first = state.work.trajectories[next(iter(replica.running))]
    what = f"tokens of {_count(len(replica.running), 'response')} of version {replica.version}"
    order = state.orders.commands.get(keys.generate_key(first.id))
    cause, event = order.cause if order is not None else None, get_tag(ev.TrajectoryFinished)
    if pause_ns := state.orders.timers.get(keys.PAUSE):
        limit = pause_ns, "the run pauses", cause, "slurm.signal_before_s"
        yield Wait("the pause", event, name, what, replica.progress_ns, *limit)
        return
    stall_ns = state.settings.stall_ms * MS
    until_ns = due_ns if due_ns - replica.progress_ns >= stall_ns else due_ns + stall_ns
    waiter = _name_step(state, state.work.groups[first.group].purpose)
    yield Wait(waiter, event, name, what, replica.progress_ns, until_ns, then, cause)


def _list_rejoin(state: State, name: str, due_ns: int) -> Iterator[Wait]:
    """Yield the wait for a lost process: its node starts it, then it must be ready."""
    actor = state.members.actors.get(name)
    role = actor.role if actor is not None else Role(name.partition("-")[0])
    joined = actor is not None and actor.alive
    event = get_tag(_READY.get(role, ev.ActorJoined) if joined else ev.ActorJoined)
    owner = name if joined else actor.node if actor is not None else role
    what = f"{name}, which was lost" if actor is not None else name
    times = due_ns - state.settings.start_timeout_ms * MS, due_ns
    then = f"the run {ROLE_TABLE[role].loss}"
    yield Wait(COORDINATOR, event, owner, what, *times, then, key=START_KEY)


def _list_receive(state: State, name: str, due_ns: int) -> Iterator[Wait]:
    chain = state.members.relay_chain
    before = chain[chain.index(name) - 1] if name in chain and chain.index(name) else "the trainer"
    since_ns = due_ns - broadcast.RECEIVE_TIMEOUT_MS * MS
    what, event = f"version {state.versions.newest} from {before}", get_tag(ev.WeightsReceived)
    yield Wait(name, event, name, what, since_ns, due_ns, f"{name} is restarted")


_TIMERS: dict[TimerKind, Callable[[State, str, int], Iterator[Wait]]] = {
    TimerKind.START: _list_start,
    TimerKind.WEIGHTS: _list_weights,
    TimerKind.BATCH_TIMEOUT: _list_batch,
    TimerKind.RESUME: _list_resume,
    TimerKind.PROGRESS: _list_progress,
    TimerKind.REJOIN: _list_rejoin,
    TimerKind.RECEIVE: _list_receive,
}
"""Waits of each kind of timer; repack's is none, and a pause is that for the responses."""
