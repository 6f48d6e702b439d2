"""Membership: which processes belong to the run, and which have been fenced out.

Reads   ActorJoined, ActorLeft, ActorFailed, ProcessExited, HeartbeatLost, NodeSilent, ...Ready
Writes  state.actors, state.replicas
Emits   AcceptActor, RefuseActor, and through recovery and relays whatever a loss calls for

An actor is (name, incarnation). Each start of its process gets the next incarnation, so words from
a dead or paused process carry a smaller number and are refused. Nothing here measures time: silence
arrives as HeartbeatLost.

A node that is silent alone takes nothing with it: its processes go on, but who of them is lost is
gone for good, since nobody starts it again, until the node is heard or another one has its place.
"""

from __future__ import annotations

from laminar import ids
from laminar.core import lifecycle, publishing, recovery, relays
from laminar.core.lookup import add_actor, add_replica, clear_timer, end_actor
from laminar.core.state import ENDED, ENDING, STOPPING, Actor, Replica, State
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, STRATEGY
from laminar.events.index import ACTOR_ROLES, NODE, RELAY, TRAINER

SINGLE_ROLES = ("store", "trainer")
"""Roles whose loss ends the run: their recovery needs a checkpoint or another copy."""


def on_actor_joined(turn: Turn, event: ev.ActorJoined) -> None:
    """Give a new process the next incarnation; whoever had its name before is lost."""
    state = turn.state
    known = state.actors.get(event.name)
    if known is not None and known.boot_id == event.boot_id:
        return turn.ignore("repeat")
    refusal = _refusal(turn, event)
    if not refusal and known is not None and known.alive:
        actor_lost(turn, event.name, "was replaced by a new process", replaced=True)
        refusal = _refusal(turn, event)  # the loss may have ended the run
    if refusal:
        turn.command(cmd.RefuseActor(to=event.name, boot_id=event.boot_id, reason=refusal))
        return
    incarnation = state.next_incarnation
    state.next_incarnation += 1
    actor = Actor(
        name=event.name,
        role=event.role,
        node=event.node,
        pid=event.pid,
        boot_id=event.boot_id,
        incarnation=incarnation,
    )
    add_actor(state, actor)
    turn.done(f"restart:{event.name}")
    if event.role != RELAY:  # that is awaited until it is ready
        turn.clear_timer(f"rejoin:{event.name}")
    turn.command(cmd.AcceptActor(to=event.name, boot_id=event.boot_id, incarnation=incarnation))
    if event.role == TRAINER:
        relays.set_head(turn)


def _refusal(turn: Turn, event: ev.ActorJoined) -> str:
    """Why this process may not join; empty when it may."""
    if event.role not in ACTOR_ROLES or event.name in (COORDINATOR, STRATEGY):
        return f"{event.name!r} with role {event.role!r} has no place in a run"
    if event.role == RELAY and event.name != _relay_of(event.node):
        return f"{event.name!r} is no name for the relay of {event.node!r}"
    if turn.state.phase in (ENDING, STOPPING, ENDED):
        return "the run is ending"
    return ""


def _relay_of(node: str) -> str:
    """Name of the relay of a machine; empty for what is no name of one."""
    try:
        return ids.actor_name(RELAY, node, 0)
    except ValueError:
        return ""


def on_actor_left(turn: Turn, event: ev.ActorLeft) -> None:
    """A clean goodbye is expected only when the run stops."""
    name = turn.stamped.peer
    turn.done(f"stop:{name}")
    if turn.state.phase in (STOPPING, ENDED):
        end_actor(turn.state, name)
    else:
        actor_lost(turn, name, "left the run")
        _missed_by_its_node(turn, name, "it left the run")


def on_actor_failed(turn: Turn, event: ev.ActorFailed) -> None:
    """An actor says that it cannot go on."""
    name = turn.stamped.peer
    if event.user_error or turn.state.actors[name].role in SINGLE_ROLES:
        if not lifecycle.fail(turn, f"{name}: {event.reason}", 2 if event.user_error else 1):
            turn.ignore("run-ending")
    else:
        actor_lost(turn, name, event.reason)
        _missed_by_its_node(turn, name, event.reason)


def on_process_exited(turn: Turn, event: ev.ProcessExited) -> None:
    """A node saw one of its processes end."""
    state = turn.state
    actor = state.actors.get(event.actor)
    why = f"its process ended with exit code {event.code}"
    if actor is not None and actor.boot_id != event.boot_id:
        # An old one, or one that was started again and never got as far as joining. After that,
        # an exit without another start is the last word: nobody is left to wait for.
        last = not event.restarting and not actor.alive
        if not (last and clear_timer(state, f"rejoin:{event.actor}")):
            return turn.ignore("old-process")
        _gone_for_good(turn, event.actor, f"{event.actor} was restarted and never joined: {why}")
        return
    if actor is None:
        never = f"{event.actor} never joined: {why}"
        if event.restarting or not lifecycle.fail(turn, never, 1):
            turn.ignore("never-joined")
        return
    stop, restart = turn.done(f"stop:{event.actor}"), turn.done(f"restart:{event.actor}")
    news = actor.alive or stop is not None or restart is not None
    if restart is not None and isinstance(restart.command, cmd.RestartActor):
        why = restart.command.reason  # how it ended says nothing to the user
    if actor.alive:
        actor_lost(turn, event.actor, why)
    if event.restarting:
        turn.set_timer(f"rejoin:{event.actor}", state.settings.start_timeout_ms)
    else:
        news = clear_timer(state, f"rejoin:{event.actor}") or news
        if not _gone_for_good(turn, event.actor, f"{event.actor}: {why}") and not news:
            turn.ignore("repeat")


def on_heartbeat_lost(turn: Turn, event: ev.HeartbeatLost) -> None:
    """The lease of an actor ran out; its node is told to make sure that it is gone."""
    state = turn.state
    actor = state.actors.get(event.actor)
    if actor is None or not actor.alive or actor.incarnation != event.actor_incarnation:
        return turn.ignore("old-incarnation")
    turn.done(f"stop:{event.actor}")
    reason = f"nothing was heard from it for {event.silent_ms} ms"
    node_alive = actor.role != NODE and state.actor_alive(actor.node)
    actor_lost(turn, event.actor, reason)
    if not node_alive:
        turn.clear_timer(f"rejoin:{event.actor}")
        _gone_for_good(turn, event.actor, f"{event.actor}: {reason}")
    elif not _missed_by_its_node(turn, event.actor, reason) and not relays.ending(state):
        turn.restart(event.actor, reason, again=True)
        turn.set_timer(f"rejoin:{event.actor}", state.settings.start_timeout_ms)


def on_node_silent(turn: Turn, event: ev.NodeSilent) -> None:
    """Its processes go on; whoever of them is lost by now is not started again."""
    state, node = turn.state, turn.state.actors.get(event.node)
    if node is None or not node.alive or node.incarnation != event.node_incarnation:
        return turn.ignore("old-incarnation")
    if node.silent:
        return turn.ignore("repeat")
    node.silent = True
    for actor in _actors_of(state, event.node):
        if not actor.alive:
            _missed_by_its_node(turn, actor.name, "it is lost")


def on_node_heard(turn: Turn, event: ev.NodeHeard) -> None:
    """From now on it starts again whom it sees end."""
    node = turn.state.actors.get(event.node)
    if node is None or not node.alive or node.incarnation != event.node_incarnation:
        return turn.ignore("old-incarnation")
    if not node.silent:
        return turn.ignore("repeat")
    node.silent = False


def _missed_by_its_node(turn: Turn, name: str, reason: str) -> bool:
    """Nobody starts a lost process again whose node is silent; False if its node is not."""
    state = turn.state
    node = state.actors.get(state.actors[name].node)
    if node is None or not node.silent:
        return False
    turn.clear_timer(f"rejoin:{name}")
    if not relays.ending(state):
        why = f"{name}: {reason}; nothing is heard from {node.name}, which would start it again"
        _gone_for_good(turn, name, why)
    return True


def restart_expired(turn: Turn, order: cmd.RestartActor) -> None:
    """Its node has not killed it: it is fenced, and ends itself as soon as it hears of that."""
    name = order.actor
    turn.done(f"restart:{name}")
    if turn.state.actor_alive(name):  # who is lost already has a time to come back
        reason = f"{order.reason}; {order.to} did not restart it"
        actor_lost(turn, name, reason)
        if not _missed_by_its_node(turn, name, reason):
            turn.set_timer(f"rejoin:{name}", turn.state.settings.start_timeout_ms)


def on_rejoin_expired(turn: Turn, name: str) -> None:
    """A restarted process did not come back."""
    _gone_for_good(turn, name, f"{name} was restarted and never joined")


def _gone_for_good(turn: Turn, name: str, why: str) -> bool:
    """Nobody starts it again. True if the run cannot go on without it, and ends."""
    if relays.indispensable(turn.state, name):
        return lifecycle.fail(turn, f"the trainer's machine has no relay: {why}", 1)
    if relays.can_work(turn.state):
        return False
    return lifecycle.fail(turn, f"no replica is left: {why}", 1)


def actor_lost(turn: Turn, name: str, reason: str, *, replaced: bool = False) -> None:
    """Fence an actor: its outstanding commands end, its work is recovered."""
    state = turn.state
    actor = state.actors[name]
    end_actor(state, name)
    actor.ready = False
    if actor.role == "rollout":
        recovery.replica_lost(turn, name)
    elif actor.role == RELAY:
        relays.leave(turn, name)
    for key in list(state.lookup.commands.get(name, ())):
        turn.done(key)
    if state.phase in (STOPPING, ENDED):
        return
    if actor.role in SINGLE_ROLES:
        lifecycle.fail(turn, f"{name} is lost: {reason}", 1)
    elif actor.role == NODE:
        _machine_lost(turn, name, reason, replaced=replaced)


def _machine_lost(turn: Turn, node: str, reason: str, *, replaced: bool) -> None:
    """Nobody watches its processes any more: they are lost with it.

    A new process that has its name starts them all anew; they have a time for it.
    """
    state, there = turn.state, _actors_of(turn.state, node)
    if any(a.role in SINGLE_ROLES and a.alive for a in there):
        lifecycle.fail(turn, f"{node} is lost: {reason}", 1)
        return
    for actor in there:
        if actor.alive:
            actor_lost(turn, actor.name, f"its machine {node} is lost")
        if replaced and not relays.ending(state):
            turn.set_timer(f"rejoin:{actor.name}", state.settings.start_timeout_ms)
        else:
            turn.clear_timer(f"rejoin:{actor.name}")
    if not replaced:
        _gone_for_good(turn, node, f"{node}: {reason}")


def _actors_of(state: State, node: str) -> list[Actor]:
    """All processes of its machine but itself, also those that are lost."""
    return [a for a in state.actors.values() if a.node == node and a.role != NODE]


def on_replica_ready(turn: Turn, event: ev.ReplicaReady) -> None:
    """An engine can take work once it has weights."""
    state, name = turn.state, turn.stamped.peer
    if name in state.replicas:
        return turn.ignore("repeat")
    state.actors[name].ready = True
    node = state.actors[name].node
    replica = Replica(
        name=name,
        relay=_relay_of(node),
        capacity=event.max_num_seqs,
        progress_ns=turn.stamped.time_ns,
    )
    add_replica(state, replica)
    if replica.relay not in state.relays and f"rejoin:{replica.relay}" not in state.timers:
        turn.set_timer(f"rejoin:{replica.relay}", state.settings.start_timeout_ms)
    turn.set_timer(f"progress:{name}", state.settings.stall_ms)
    turn.touch(name)


def on_relay_ready(turn: Turn, event: ev.RelayReady) -> None:
    """It takes its place in the chain; that of the trainer's machine needs what the trainer has."""
    if _ready(turn):
        relay = relays.join(turn, turn.state.actors[turn.stamped.peer], event.bulk)
        if relay is turn.state.master():
            publishing.owe_newest(turn)


def on_trainer_ready(turn: Turn, event: ev.TrainerReady) -> None:
    _ready(turn)


def _ready(turn: Turn) -> bool:
    """The sender can do its work; False if that was known."""
    actor = turn.state.actors[turn.stamped.peer]
    if actor.ready:
        turn.ignore("repeat")
        return False
    actor.ready = True
    return True


def on_data_loaded(turn: Turn, event: ev.DataLoaded) -> None:
    """The store has the prompts; now their number is known, and stays what it is."""
    state = turn.state
    if state.num_train >= 0:
        return turn.ignore("repeat")
    _ready(turn)
    state.num_train, state.num_eval = event.num_train, event.num_eval
