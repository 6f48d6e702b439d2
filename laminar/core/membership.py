"""Membership: which processes belong to the run, and which have been fenced out.

Reads   ActorJoined, ActorLeft, ActorFailed, ProcessExited, HeartbeatLost, NodeSilent, ...Ready
Writes  state.actors, state.replicas
Emits   AcceptActor, RefuseActor, and through recovery and relays whatever a loss calls for

An actor is (name, incarnation). Each start of its process gets the next incarnation, so events
from a dead or paused process carry a smaller number and are refused. Nothing here measures time:
silence arrives as HeartbeatLost.

When only the node is silent, its processes go on; but one of them that is lost is not started
again until the node is heard or another one has its place.
"""

from __future__ import annotations

from laminar import ids
from laminar.core import forks, keys, lifecycle, publishing, recovery, redo, relays, store_restarts
from laminar.core.context import Context
from laminar.core.indexes import (
    add_actor,
    add_replica,
    clear_timer,
    end_actor,
    indexes_of,
    master_relay,
    trainer,
)
from laminar.core.registry import ENDS_RUN, LOSES_ACTOR, handles
from laminar.core.state import Actor, Packing, Replica, State
from laminar.core.statuses import Phase
from laminar.core.validation import COUNT_MAX, ROWS_MAX, anything
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, STRATEGY
from laminar.roles import ACTOR_ROLES, Role

SINGLE_ROLES = (Role.STORE, Role.TRAINER)
"""Roles whose loss ends the run, unless a rule says otherwise (core/store_restarts.py, redo.py)."""


@handles(ev.ActorJoined, valid=anything, leads_to=(cmd.AcceptActor, cmd.RefuseActor, *LOSES_ACTOR))
def on_actor_joined(ctx: Context, event: ev.ActorJoined) -> None:
    """Give a new process the next incarnation; the process that had its name before is lost."""
    state = ctx.state
    known = state.actors.get(event.name)
    if known is not None and known.boot_id == event.boot_id:
        return ctx.ignore("repeat")
    refusal = _refusal(ctx, event)
    if not refusal and known is not None and known.alive:
        actor_lost(ctx, event.name, "was replaced by a new process", replaced=True)
        refusal = _refusal(ctx, event)  # the loss may have ended the run
    if refusal:
        ctx.command(cmd.RefuseActor(to=event.name, boot_id=event.boot_id, reason=refusal))
        return
    incarnation = state.next_incarnation
    state.next_incarnation += 1
    actor = Actor(
        name=event.name,
        role=Role(event.role),
        node=event.node,
        pid=event.pid,
        boot_id=event.boot_id,
        incarnation=incarnation,
    )
    add_actor(state, actor)
    store_restarts.joined(state, actor)
    ctx.done(keys.restart(event.name))
    ready_later = event.role in (Role.RELAY, Role.TRAINER)
    if not (ready_later or store_restarts.is_restarted(state, event.role)):
        ctx.clear_timer(keys.rejoin(event.name))
    ctx.command(cmd.AcceptActor(to=event.name, boot_id=event.boot_id, incarnation=incarnation))
    if event.role == Role.TRAINER:
        relays.set_head(ctx)
    elif event.role == Role.ROLLOUT and state.newest >= 0:
        ctx.clear_timer(keys.START)  # it was all that the start still waited for


def _refusal(ctx: Context, event: ev.ActorJoined) -> str:
    """Why this process may not join; empty when it may."""
    if event.role not in ACTOR_ROLES or event.name in (COORDINATOR, STRATEGY):
        return f"{event.name!r} with role {event.role!r} has no place in a run"
    if event.role == Role.RELAY and event.name != _relay_of(event.node):
        return f"{event.name!r} is no name for the relay of {event.node!r}"
    known = ctx.state.actors.get(event.name)
    if known is not None and known.role != event.role:
        return f"{event.name!r} is a {known.role} of this run, and no {event.role}"
    if relays.ending(ctx.state) and not store_restarts.may_join(ctx.state, event.role):
        return "the run is ending"
    first = trainer(ctx.state) if event.role == Role.TRAINER else None
    if first is None or not redo.comes_back(ctx.state, first.name):
        return ""
    same = (event.name, event.node) == (first.name, first.node)
    return "" if same else f"the trainer of this run is {first.name} on {first.node}"


def _relay_of(node: str) -> str:
    """Name of the relay of a machine; empty for what is no name of one."""
    try:
        return ids.actor_name(Role.RELAY, node, 0)
    except ValueError:
        return ""


@handles(ev.ActorLeft, valid=anything, leads_to=LOSES_ACTOR)
def on_actor_left(ctx: Context, event: ev.ActorLeft) -> None:
    """An actor leaves in good order only when the run stops."""
    name = ctx.stamped.peer
    ctx.done(keys.stop(name))
    if ctx.state.phase in (Phase.STOPPING, Phase.ENDED):
        end_actor(ctx.state, name)
    else:
        actor_lost(ctx, name, "left the run")
        _missed_by_its_node(ctx, name, "it left the run")


@handles(ev.ActorFailed, valid=anything, leads_to=LOSES_ACTOR)
def on_actor_failed(ctx: Context, event: ev.ActorFailed) -> None:
    """An actor says that it cannot go on."""
    name = ctx.stamped.peer
    alone = ctx.state.actors[name].role in SINGLE_ROLES and not redo.comes_back(ctx.state, name)
    if event.user_error or alone:
        if not lifecycle.fail(ctx, f"{name}: {event.reason}", 2 if event.user_error else 1):
            ctx.ignore("run-ending")
    else:
        actor_lost(ctx, name, event.reason)
        _missed_by_its_node(ctx, name, event.reason)


@handles(ev.ProcessExited, valid=anything, leads_to=LOSES_ACTOR)
def on_process_exited(ctx: Context, event: ev.ProcessExited) -> None:
    """A node saw one of its processes end."""
    state = ctx.state
    actor = state.actors.get(event.actor)
    why = f"its process ended with exit code {event.code}"
    why = f"{why}; {event.reason}" if event.reason else why
    if actor is not None and actor.boot_id != event.boot_id:
        # An old one, or one that was started again and never got as far as joining. After that,
        # after an exit without another start there is no process to wait for.
        last = not event.restarting and not actor.alive
        if not (last and clear_timer(state, keys.rejoin(event.actor))):
            return ctx.ignore("old-process")
        _gone_for_good(ctx, event.actor, f"{event.actor} was restarted and never joined: {why}")
        return
    if actor is None:
        never = f"{event.actor} never joined: {why}"
        if event.restarting or not lifecycle.fail(ctx, never, 1):
            ctx.ignore("never-joined")
        return
    stop, restart = ctx.done(keys.stop(event.actor)), ctx.done(keys.restart(event.actor))
    news = actor.alive or stop is not None or restart is not None
    if restart is not None and isinstance(restart.command, cmd.RestartActor):
        why = restart.command.reason  # how it ended says nothing to the user
    if actor.alive:
        actor_lost(ctx, event.actor, why)
    if event.restarting:
        ctx.set_timer(keys.rejoin(event.actor), state.settings.start_timeout_ms)
    else:
        news = clear_timer(state, keys.rejoin(event.actor)) or news
        if not _gone_for_good(ctx, event.actor, f"{event.actor}: {why}") and not news:
            ctx.ignore("repeat")


@handles(ev.HeartbeatLost, valid=anything, leads_to=(*LOSES_ACTOR, cmd.RestartActor))
def on_heartbeat_lost(ctx: Context, event: ev.HeartbeatLost) -> None:
    """The lease of an actor ran out; its node is ordered to make sure that it is gone."""
    state = ctx.state
    actor = state.actors.get(event.actor)
    if actor is None or not actor.alive or actor.incarnation != event.actor_incarnation:
        return ctx.ignore("old-incarnation")
    ctx.done(keys.stop(event.actor))
    reason = f"nothing was heard from it for {event.silent_ms} ms"
    node_alive = actor.role != Role.NODE and state.actor_alive(actor.node)
    actor_lost(ctx, event.actor, reason)
    if not node_alive:
        ctx.clear_timer(keys.rejoin(event.actor))
        _gone_for_good(ctx, event.actor, f"{event.actor}: {reason}")
    elif not _missed_by_its_node(ctx, event.actor, reason) and _is_needed(state, actor):
        ctx.restart(event.actor, reason, again=True)
        ctx.set_timer(keys.rejoin(event.actor), state.settings.start_timeout_ms)


@handles(ev.NodeSilent, valid=anything, leads_to=ENDS_RUN)
def on_node_silent(ctx: Context, event: ev.NodeSilent) -> None:
    """Its processes go on; those that are lost by now are not started again."""
    state, node = ctx.state, ctx.state.actors.get(event.node)
    if node is None or not node.alive or node.incarnation != event.node_incarnation:
        return ctx.ignore("old-incarnation")
    if node.silent:
        return ctx.ignore("repeat")
    node.silent = True
    for actor in _actors_of(state, event.node):
        if not actor.alive:
            _missed_by_its_node(ctx, actor.name, "it is lost")


@handles(ev.NodeHeard, valid=anything)
def on_node_heard(ctx: Context, event: ev.NodeHeard) -> None:
    """From now on it restarts the processes that it sees end."""
    node = ctx.state.actors.get(event.node)
    if node is None or not node.alive or node.incarnation != event.node_incarnation:
        return ctx.ignore("old-incarnation")
    if not node.silent:
        return ctx.ignore("repeat")
    node.silent = False


def _missed_by_its_node(ctx: Context, name: str, reason: str) -> bool:
    """A lost process whose node is silent is not started again; False if its node is not silent."""
    state = ctx.state
    node = state.actors.get(state.actors[name].node)
    if node is None or not node.silent:
        return False
    ctx.clear_timer(keys.rejoin(name))
    if _is_needed(state, state.actors[name]):
        why = f"{name}: {reason}; nothing is heard from {node.name}, which would start it again"
        _gone_for_good(ctx, name, why)
    return True


def _is_needed(state: State, actor: Actor) -> bool:
    """It is to come back when it is lost."""
    return not relays.ending(state) or store_restarts.may_join(state, actor.role)


def restart_expired(ctx: Context, order: cmd.RestartActor) -> None:
    """Its node has not killed it: it is fenced, and ends itself as soon as it hears of that."""
    name = order.actor
    ctx.done(keys.restart(name))
    if ctx.state.actor_alive(name):  # who is lost already has a time to come back
        reason = f"{order.reason}; {order.to} did not restart it"
        actor_lost(ctx, name, reason)
        if not _missed_by_its_node(ctx, name, reason):
            ctx.set_timer(keys.rejoin(name), ctx.state.settings.start_timeout_ms)


def on_rejoin_expired(ctx: Context, name: str) -> None:
    """A restarted process did not come back."""
    _gone_for_good(ctx, name, f"{name} was restarted and never joined")


def _gone_for_good(ctx: Context, name: str, why: str) -> bool:
    """It is not started again. True if the run cannot go on without it, and ends."""
    actor = ctx.state.actors.get(name)
    if actor is not None and store_restarts.is_restarted(ctx.state, actor.role):
        ctx.clear_timer(keys.rejoin(name))
        return lifecycle.fail(ctx, f"the store is lost: {why}", 1)
    if redo.comes_back(ctx.state, name) and not relays.ending(ctx.state):
        return lifecycle.fail(ctx, why, 1)
    if relays.indispensable(ctx.state, name):
        return lifecycle.fail(ctx, f"the trainer's machine has no relay: {why}", 1)
    if relays.can_work(ctx.state):
        return False
    return lifecycle.fail(ctx, f"no replica is left: {why}", 1)


def actor_lost(
    ctx: Context, name: str, reason: str, *, replaced: bool = False, blame: bool = True
) -> None:
    """Fence an actor: its outstanding commands end, its work is recovered.

    `blame`: what it worked on may have ended it.
    """
    state = ctx.state
    actor = state.actors[name]
    end_actor(state, name)
    actor.ready = False
    if actor.role == Role.ROLLOUT:
        recovery.replica_lost(ctx, name, blame=blame)
    elif redo.comes_back(state, name):
        redo.trainer_lost(ctx, name, reason, blame=blame)
    elif actor.role == Role.RELAY:
        relays.leave(ctx, name)
    elif store_restarts.is_restarted(state, actor.role):
        store_restarts.lost(ctx, name)
    for key in list(indexes_of(state).commands.get(name, ())):
        if not store_restarts.waits(state, state.commands[key].command):
            ctx.done(key)
    if state.phase in (Phase.STOPPING, Phase.ENDED):
        return
    if _ends_run(state, actor):
        lifecycle.fail(ctx, f"{name} is lost: {reason}", 1)
    elif actor.role == Role.NODE:
        _machine_lost(ctx, name, reason, replaced=replaced)


def _ends_run(state: State, actor: Actor) -> bool:
    """Its loss does."""
    restarted = store_restarts.is_restarted(state, actor.role) or redo.comes_back(state, actor.name)
    return actor.role in SINGLE_ROLES and not restarted


def _machine_lost(ctx: Context, node: str, reason: str, *, replaced: bool) -> None:
    """Its processes are no longer watched: they are lost with it.

    A new process that has its name starts them all anew; they have a time for it.
    """
    state, there = ctx.state, _actors_of(ctx.state, node)
    needed = (a for a in there if a.role in SINGLE_ROLES)
    if any(a.alive or keys.rejoin(a.name) in state.timers for a in needed):
        lifecycle.fail(ctx, f"{node} is lost: {reason}", 1)
        return
    for actor in there:
        if actor.alive:
            actor_lost(ctx, actor.name, f"its machine {node} is lost")
        if replaced and not relays.ending(state):
            ctx.set_timer(keys.rejoin(actor.name), state.settings.start_timeout_ms)
        else:
            ctx.clear_timer(keys.rejoin(actor.name))
    if not replaced:
        _gone_for_good(ctx, node, f"{node}: {reason}")


def _actors_of(state: State, node: str) -> list[Actor]:
    """All processes of its machine but itself, also those that are lost."""
    return [a for a in state.actors.values() if a.node == node and a.role != Role.NODE]


def _holds_a_group(state: State, event: ev.ReplicaReady) -> bool:
    """Or it would wait for work that never fits."""
    return state.settings.group_size <= event.max_num_seqs <= COUNT_MAX


@handles(
    ev.ReplicaReady,
    valid=_holds_a_group,
    leads_to=(cmd.PullWeights, cmd.ScoreTrajectories, cmd.PinVersion, cmd.EndTrajectories),
)
def on_replica_ready(ctx: Context, event: ev.ReplicaReady) -> None:
    """An engine can take work once it has weights."""
    state, name = ctx.state, ctx.stamped.peer
    if name in state.replicas:
        return ctx.ignore("repeat")
    state.actors[name].ready = True
    node = state.actors[name].node
    replica = Replica(
        name=name,
        relay=_relay_of(node),
        capacity=event.max_num_seqs,
        progress_ns=ctx.stamped.time_ns,
    )
    if state.settings.repack_policy:
        replica.packing = Packing(max_batch=event.max_batch, kv_capacity=event.kv_capacity_tokens)
    add_replica(state, replica)
    if replica.relay not in state.relays and keys.rejoin(replica.relay) not in state.timers:
        ctx.set_timer(keys.rejoin(replica.relay), state.settings.start_timeout_ms)
    ctx.set_timer(keys.progress(name), state.settings.stall_ms)
    ctx.touch(name)


@handles(
    ev.RelayReady, valid=anything, leads_to=(cmd.PublishWeights, cmd.ForwardWeights, cmd.PinVersion)
)
def on_relay_ready(ctx: Context, event: ev.RelayReady) -> None:
    """It takes its place in the chain; that of the trainer's machine needs what the trainer has."""
    if _ready(ctx):
        relay = relays.join(ctx, ctx.state.actors[ctx.stamped.peer], event.bulk)
        if relay is master_relay(ctx.state):
            publishing.owe_republish(ctx)


def _ready(ctx: Context) -> bool:
    """The sender can do its work; False if that was known."""
    actor = ctx.state.actors[ctx.stamped.peer]
    if actor.ready:
        ctx.ignore("repeat")
        return False
    actor.ready = True
    return True


def _row_counts(state: State, event: ev.DataLoaded) -> bool:
    """Steps need rows; a run without a number of steps may have none, and only evaluates."""
    least = 1 if state.settings.total_steps else 0
    return least <= event.num_train <= ROWS_MAX and 0 <= event.num_eval <= ROWS_MAX


@handles(
    ev.DataLoaded,
    valid=_row_counts,
    leads_to=(cmd.PublishWeights,),
)
def on_data_loaded(ctx: Context, event: ev.DataLoaded) -> None:
    """The store has the prompts; now their number is known, and stays what it is: a store that is
    started again refuses other data."""
    state, restarted = ctx.state, store_restarts.is_restarted(ctx.state, Role.STORE)
    known = state.num_train >= 0
    if known and not restarted:
        return ctx.ignore("repeat")
    if _ready(ctx) and restarted:
        store_restarts.ready(ctx, ctx.stamped.peer)
    if not known:
        state.num_train, state.num_eval = event.num_train, event.num_eval
        forks.data_loaded(state, event)
