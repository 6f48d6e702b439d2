"""Membership: which processes belong to the run, and which have been fenced out.

Reads   ActorJoined, ReplicaReady, ActorLeft, ActorFailed, ProcessExited, HeartbeatLost, NodeSilent,
        NodeRecovered
Writes  state.members.actors, state.members.replicas
Emits   AcceptActor, RefuseActor, and through recovery and relays whatever a loss calls for

An actor is (name, incarnation). Each start of its process gets the next incarnation, so events
from a dead or paused process carry a smaller number and are refused. Nothing here measures time:
silence arrives as HeartbeatLost.

When only the node is silent, its processes continue; a lost one has the time of a start to come
back, for which the node must respond again or be replaced. A lost node takes its processes with it.
They have the same time to come back, with a new process of the node; processes that its former
process started are refused. A machine that is silent as a whole may be cut off and still running:
its work is not to blame.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.core import store_orders
from laminar.core.context import Context
from laminar.core.failing import fail_run
from laminar.core.members import lifecycle
from laminar.core.registry import handles
from laminar.core.scheduling import recovery
from laminar.core.state import indexes, keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.members import ActorState, Replica
from laminar.core.state.migrations import RepackState
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.steps import step_replay
from laminar.core.validation import COUNT_MAX, accept_any
from laminar.core.versions import broadcast
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.roles import ACTOR_ROLES, ROLE_TABLE, Loss, Place, Role

REPLACED = "another process has its place"
OTHER_NODE = "{} was lost or replaced since it has started this process"
FORMER_MAX = 4
"""The boots remembered per node: after a network cut, the hello of an ended one comes soon."""


@handles(ev.ActorJoined, valid=accept_any)
def on_actor_joined(ctx: Context, event: ev.ActorJoined) -> None:
    """Give a new process the next incarnation; the process that had its name before is lost."""
    state = ctx.state
    known = state.members.actors.get(event.name)
    if known is not None and known.boot_id == event.boot_id:
        return ctx.ignore("repeat")
    refusal = _find_refusal_reason(ctx, event)
    if not refusal and known is not None and known.alive:
        actor_lost(ctx, event.name, "was replaced by a new process")
        refusal = _find_refusal_reason(ctx, event)  # the loss may have ended the run
    if refusal:
        refused = cmd.RefuseActor(to=event.name, boot_id=event.boot_id, reason=refusal)
        return ctx.issue_command(refused)
    actor = _create_actor(state, event, known)
    indexes.add_actor(state, actor)
    ctx.end_command(keys.restart_key(event.name))
    if not ROLE_TABLE[actor.role].is_back_ready:
        ctx.clear_timer(keys.rejoin_timer(event.name))
    ctx.issue_command(
        cmd.AcceptActor(to=event.name, boot_id=event.boot_id, incarnation=actor.incarnation)
    )
    if actor.role in _JOINED:
        _JOINED[actor.role](ctx, actor)


def _await_ready(ctx: Context, actor: ActorState) -> None:
    """Watch the start of a replica's engine, or of a host of agents."""
    if ctx.state.versions.newest >= 0 and broadcast.can_start(ctx.state):
        ctx.clear_timer(keys.START)  # the start waited for nothing else
    ctx.set_timer(keys.progress_timer(actor.name), ctx.state.settings.engine_start_ms)


def _can_hold_group(state: State, event: ev.ReplicaReady) -> bool:
    """Return whether a replica can hold a group; else it would wait for work that never fits."""
    return state.settings.group_size <= event.max_num_seqs <= COUNT_MAX


@handles(ev.ReplicaReady, valid=_can_hold_group)
def on_replica_ready(ctx: Context, event: ev.ReplicaReady) -> None:
    """Register a replica whose engine can take work once it has weights."""
    state, name = ctx.state, ctx.stamped.peer
    if not ctx.mark_ready():
        return
    replica = Replica(
        name=name,
        relay=broadcast.name_of(Role.RELAY, state.members.actors[name].node),
        capacity=event.max_num_seqs,
        progress_ns=ctx.stamped.time_ns,
    )
    if state.settings.repack_policy:
        replica.repack = RepackState(
            max_batch=event.max_batch, kv_capacity=event.kv_capacity_tokens
        )
    indexes.add_replica(state, replica)
    if (
        replica.relay not in state.members.relays
        and keys.rejoin_timer(replica.relay) not in state.orders.timers
    ):
        ctx.set_timer(keys.rejoin_timer(replica.relay), state.settings.start_timeout_ms)
    ctx.set_timer(keys.progress_timer(name), state.settings.stall_ms)
    ctx.touch_replica(name)


def _create_actor(state: State, event: ev.ActorJoined, known: ActorState | None) -> ActorState:
    """Create the actor of a joining process; `known` is the earlier process of its name."""
    if event.start:
        state.members.start_numbers[event.name] = event.start
    elif known is not None:
        former = *state.members.former_boot_ids.get(event.name, ()), known.boot_id
        state.members.former_boot_ids[event.name] = former[-FORMER_MAX:]
    incarnation = state.members.next_incarnation
    state.members.next_incarnation += 1
    return ActorState(
        name=event.name,
        role=Role(event.role),
        node=event.node,
        pid=event.pid,
        boot_id=event.boot_id,
        incarnation=incarnation,
        job=event.job,
        job_restarts=event.job_restarts,
        start_failure=known.start_failure if known is not None else "",
    )


def _find_refusal_reason(ctx: Context, event: ev.ActorJoined) -> str | None:
    """Return why this process may not join; None: it may."""
    if event.role not in ACTOR_ROLES or event.name in (Role.COORDINATOR, Role.STRATEGY):
        return f"{event.name!r} with role {event.role!r} has no place in a run"
    one = ROLE_TABLE[event.role].place == Place.EACH
    if one and event.name != broadcast.name_of(event.role, event.node):
        return f"{event.name!r} is not the name of the {event.role} of {event.node!r}"
    known = ctx.state.members.actors.get(event.name)
    if _has_ended(ctx.state, event, known):
        return REPLACED
    if known is not None and known.role != event.role:
        return f"{event.name!r} is a {known.role} of this run, and no {event.role}"
    if known is not None and known.job == event.job and known.job_restarts > event.job_restarts:
        return f"job {event.job} was started again since, and {event.name!r} is of that start"
    if broadcast.is_run_ending(ctx.state) and not _can_join_late(ctx.state, event):
        return "the run is ending"
    if not _is_of_its_node(ctx.state, event):
        return OTHER_NODE.format(event.node)
    first = indexes.find_trainer(ctx.state) if event.role == Role.TRAINER else None
    if first is None or not step_replay.may_be_lost(ctx.state, first.name):
        return None
    same = (event.name, event.node) == (first.name, first.node)
    return None if same else f"the trainer of this run is {first.name} on {first.node}"


def _has_ended(state: State, event: ev.ActorJoined, known: ActorState | None) -> bool:
    """Return whether a hello is late: its node has started another process of the name since.

    Nodes are not numbered; their last boots are remembered instead."""
    if event.start and known is not None and known.node == event.node:
        return event.start < state.members.start_numbers.get(event.name, 0)
    return event.boot_id in state.members.former_boot_ids.get(event.name, ())


def _can_join_late(state: State, event: ev.ActorJoined) -> bool:
    """Return whether a process may join a run that ends: the store, or a node that restarts it."""
    if event.role != Role.NODE:
        return broadcast.is_needed(state, event.role)
    return any(broadcast.is_needed(state, actor.role) for actor in _actors_of(state, event.name))


def _is_of_its_node(state: State, event: ev.ActorJoined) -> bool:
    """Return whether the process was started by the current process of its node, or names none."""
    node = state.members.actors.get(event.node)
    present = node.boot_id if node is not None and node.alive else ""
    return event.role == Role.NODE or event.node_boot in ("", present)


@handles(ev.ActorLeft, valid=accept_any)
def on_actor_left(ctx: Context, event: ev.ActorLeft) -> None:
    """Record a graceful leave, on a stop or a signal; the actor's work is not to blame."""
    name = ctx.stamped.peer
    ctx.end_command(keys.stop_key(name))
    if ctx.state.run.phase in (Phase.STOPPING, Phase.ENDED):
        indexes.end_actor(ctx.state, name)
    else:
        actor_lost(ctx, name, "left the run", blame=False)


@handles(ev.ActorFailed, valid=accept_any)
def on_actor_failed(ctx: Context, event: ev.ActorFailed) -> None:
    """Handle an actor that cannot continue: end the run, or recover its work."""
    name = ctx.stamped.peer
    needed = ROLE_TABLE[ctx.state.members.actors[name].role].loss == Loss.ENDS
    alone = needed and not step_replay.may_be_lost(ctx.state, name)
    if event.user_error or alone:
        kind = FailureKind.USER_MISTAKE if event.user_error else FailureKind.PROCESS_FAILED
        if not fail_run(ctx, kind, name, f"{name}: {event.reason}"):
            ctx.ignore("run-ending")
    else:
        again = event.engine and _is_failing_each_start(ctx.state, name, event.reason)
        actor_lost(ctx, name, event.reason, blame=not event.link)
        if again:
            fail_run(ctx, FailureKind.ENGINE_FAILS, name, event.reason)


def _is_failing_each_start(state: State, name: str, reason: str) -> bool:
    """Return whether two starts in a row failed alike and no replica has weights.

    Another start would change nothing."""
    actor, replica = state.members.actors[name], state.members.replicas.get(name)
    served = replica is not None and replica.version >= 0
    before, actor.start_failure = actor.start_failure, "" if served else reason
    return before == reason and not any(r.version >= 0 for r in state.members.replicas.values())


@handles(ev.ProcessExited, valid=accept_any)
def on_process_exited(ctx: Context, event: ev.ProcessExited) -> None:
    """Handle the end of a process that its node has seen."""
    state = ctx.state
    actor = state.members.actors.get(event.actor)
    why = f"its process ended with exit code {event.code}"
    if actor is not None and actor.boot_id == event.boot_id and not actor.alive:
        why = actor.start_failure or why
    why = f"{why}; {event.reason}" if event.reason else why
    if actor is not None and actor.boot_id != event.boot_id:
        # Either an old process, or one that was restarted and never joined. In the second case, an
        # exit without another start leaves no process to wait for.
        last = not event.restarting and not actor.alive
        if not (last and indexes.clear_timer(state, keys.rejoin_timer(event.actor))):
            return ctx.ignore("old-process")
        _give_up_process(ctx, event.actor, f"{event.actor} was restarted and never joined: {why}")
        return
    if actor is None:
        never = FailureKind.NEVER_JOINED
        if event.restarting or not fail_run(ctx, never, event.actor, why):
            ctx.ignore("never-joined")
        return
    stop, restart = (
        ctx.end_command(keys.stop_key(event.actor)),
        ctx.end_command(keys.restart_key(event.actor)),
    )
    news = actor.alive or stop is not None or restart is not None
    if restart is not None and isinstance(restart.command, cmd.RestartActor):
        why = restart.command.reason  # its exit code says nothing to the user
    if actor.alive:
        actor_lost(ctx, event.actor, why)
    if event.restarting:
        ctx.set_timer(keys.rejoin_timer(event.actor), state.settings.start_timeout_ms)
    else:
        news = indexes.clear_timer(state, keys.rejoin_timer(event.actor)) or news
        if not _give_up_process(ctx, event.actor, f"{event.actor}: {why}") and not news:
            ctx.ignore("repeat")


@handles(ev.HeartbeatLost, valid=accept_any)
def on_heartbeat_lost(ctx: Context, event: ev.HeartbeatLost) -> None:
    """Fence an actor whose lease ran out; its node is ordered to make sure that it is gone."""
    state = ctx.state
    actor = state.members.actors.get(event.actor)
    if actor is None or not actor.alive or actor.incarnation != event.actor_incarnation:
        return ctx.ignore("old-incarnation")
    ctx.end_command(keys.stop_key(event.actor))
    reason = f"nothing was heard from it for {event.silent_ms} ms"
    node_alive = actor.role != Role.NODE and state.members.is_actor_alive(actor.node)
    actor_lost(ctx, event.actor, reason, blame=not event.cut_off)
    if not node_alive:
        ctx.clear_timer(keys.rejoin_timer(event.actor))
        _give_up_process(ctx, event.actor, f"{event.actor}: {reason}")
    elif broadcast.is_needed(state, actor.role):
        ctx.restart_actor(event.actor, reason, again=True, cut_off=event.cut_off)


@handles(ev.NodeSilent, valid=accept_any)
def on_node_silent(ctx: Context, event: ev.NodeSilent) -> None:
    """Mark a node as silent: its processes continue, and lost ones wait for it."""
    _set_silent(ctx, event, silent=True)


@handles(ev.NodeRecovered, valid=accept_any)
def on_node_recovered(ctx: Context, event: ev.NodeRecovered) -> None:
    """Mark a node as heard again: it carries out restarts, and sees processes end."""
    _set_silent(ctx, event, silent=False)


def _set_silent(ctx: Context, event: ev.NodeSilent | ev.NodeRecovered, *, silent: bool) -> None:
    node = ctx.state.members.actors.get(event.node)
    if node is None or not node.alive or node.incarnation != event.node_incarnation:
        ctx.ignore("old-incarnation")
    elif node.silent == silent:
        ctx.ignore("repeat")
    else:
        node.silent = silent


def restart_expired(ctx: Context, order: cmd.RestartActor) -> None:
    """Fence a process that its node has not killed; it ends itself when it learns of that."""
    name = order.actor
    ctx.end_command(keys.restart_key(name))
    if ctx.state.members.is_actor_alive(name):  # a lost actor already has a time to return
        actor_lost(ctx, name, f"{order.reason}; {order.to} did not restart it")


def handle_rejoin_timeout(ctx: Context, name: str) -> None:
    """Give up a restarted process that did not return, or whose node did not."""
    actor = ctx.state.members.actors.get(name)
    node = ctx.state.members.actors.get(actor.node) if actor is not None else None
    if node is not None and node.alive and node.silent:
        why = f"{name} is lost, and {node.name}, which would restart it, is silent"
    elif node is None or node.alive:
        why = f"{name} was restarted and never joined"
    else:
        why = f"{name} is lost with its machine {node.name}, and no other node has its place"
    _give_up_process(ctx, name, why)


def _give_up_process(ctx: Context, name: str, why: str) -> bool:
    """Give up restarting a process; return whether the run cannot continue without it, and ends.

    A node may be replaced yet: its processes have a time to come back."""
    state, actor = ctx.state, ctx.state.members.actors.get(name)
    role = actor.role if actor is not None else Role.RELAY  # awaited by replicas, and never joined
    loss = ROLE_TABLE[role].loss
    if role == Role.NODE or loss == Loss.CONTINUES:
        return False
    ends = loss == Loss.ENDS and broadcast.is_needed(state, role)
    if ends or broadcast.is_trainer_relay(state, name):
        return fail_run(ctx, _LOSS_FAILURES.get(role, FailureKind.PROCESS_LOST), name, why)
    return not broadcast.can_work(state) and fail_run(ctx, FailureKind.REPLICAS_LOST, name, why)


def actor_lost(ctx: Context, name: str, reason: str, *, blame: bool = True) -> None:
    """Fence an actor: its outstanding commands end, its work is recovered.

    With `blame`, its work may have ended it."""
    state = ctx.state
    actor = state.members.actors[name]
    indexes.end_actor(state, name)
    actor.ready = False
    if state.run.stopped:  # its work is lost when the run is resumed
        return
    if actor.role in _LOST:
        _LOST[actor.role](ctx, name, reason, blame)
    if actor.role != Role.NODE and broadcast.is_needed(state, actor.role):
        ctx.set_timer(keys.rejoin_timer(name), state.settings.start_timeout_ms)
    for key in list(indexes.indexes_of(state).commands.get(name, ())):
        if not store_orders.can_survive_restart(state, state.orders.commands[key].command):
            ctx.end_command(key)
    if actor.role == Role.NODE and state.run.phase not in (Phase.STOPPING, Phase.ENDED):
        _machine_lost(ctx, name, reason)


def _lose_trainer(ctx: Context, name: str, reason: str, blame: bool) -> None:
    """Await the next trainer; without checkpoints, end the run before another actor is lost."""
    if step_replay.may_be_lost(ctx.state, name):
        step_replay.trainer_lost(ctx, name, reason, blame=blame)
    else:
        fail_run(ctx, FailureKind.PROCESS_LOST, name, reason)
    lifecycle.end_failed_run(ctx)


def _machine_lost(ctx: Context, node: str, reason: str) -> None:
    """Lose all processes of a lost machine, which no node watches any longer."""
    for actor in _actors_of(ctx.state, node):
        if actor.alive:
            actor_lost(ctx, actor.name, f"its machine {node} is lost: {reason}", blame=False)
        ctx.clear_timer(keys.rejoin_timer(actor.name))
    _await_machine(ctx, node)


def _await_machine(ctx: Context, node: str) -> None:
    """Give the processes of a new node process, which starts them, a time to join."""
    for actor in _actors_of(ctx.state, node):
        ctx.state.members.start_numbers.pop(
            actor.name, None
        )  # the node numbers them from the start
        if not actor.alive and broadcast.is_needed(ctx.state, actor.role):
            ctx.set_timer(keys.rejoin_timer(actor.name), ctx.state.settings.start_timeout_ms)


def _actors_of(state: State, node: str) -> list[ActorState]:
    """List all processes of its machine but itself, also lost ones."""
    return [a for a in state.members.actors.values() if a.node == node and a.role != Role.NODE]


_JOINED: dict[Role, Callable[[Context, ActorState], None]] = {
    Role.NODE: lambda ctx, actor: _await_machine(ctx, actor.name),
    Role.STORE: store_orders.handle_store_joined,
    Role.TRAINER: lambda ctx, actor: broadcast.set_head(ctx),
    Role.ROLLOUT: _await_ready,
    Role.AGENT: _await_ready,
}
"""Further consequences of a process that joins, by role."""
_LOST: dict[Role, Callable[[Context, str, str, bool], None]] = {
    Role.STORE: lambda ctx, name, reason, blame: store_orders.handle_store_lost(ctx, name),
    Role.TRAINER: _lose_trainer,
    Role.RELAY: lambda ctx, name, reason, blame: broadcast.handle_relay_lost(ctx, name),
    Role.ROLLOUT: lambda ctx, name, reason, blame: recovery.replica_lost(ctx, name, blame=blame),
    Role.AGENT: lambda ctx, name, reason, blame: recovery.host_lost(ctx, name),
}
"""Further consequences of a lost process, whose commands are still outstanding, by role."""
_LOSS_FAILURES = {
    Role.STORE: FailureKind.STORE_LOST,
    Role.TRAINER: FailureKind.TRAINER_LOST,
    Role.RELAY: FailureKind.RELAY_LOST,
}
