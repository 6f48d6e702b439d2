"""Broadcast: the chain of relays in which weights pass from machine to machine.

Reads   RelayReady, WeightsReceived, RelayLinked, TransferProblem; losses of relays
Writes  state.members.relays, state.members.relay_chain, relay.held, relay.successor
Emits   ForwardWeights, PinVersion, RestartActor

The relay of the trainer's machine is the head, since every version begins there. The others follow
in the order in which they became ready; one that repeatedly holds up a transfer goes to the end. A
relay knows only its successor, so a loss costs one command: its predecessor feeds its successor,
which names the chunks that it lacks. No other relay is concerned.

Each relay must have its predecessor's versions within a timeout; one that does not is restarted.
The timeout is the transfer time at the rate that the relay has measured, if that is longer. The
head has the trainer's weights, or they are owed (core/versions/publishing.py).
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.state import indexes, keys
from laminar.core.state.indexes import indexes_of, master_relay
from laminar.core.state.members import RelayState
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.validation import accept_any, are_allocated, is_count, of_a_version
from laminar.core.versions import load_sources, pinning, publishing
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import ids
from laminar.names.roles import ROLE_TABLE, Role

LINK_TIMEOUT_MS = 30_000
"""The timeout of one connection between two machines; its handshake is a few messages."""
UNLINKED_MAX = 2
"""The successors in a row that a relay may fail to reach before it is at fault itself."""
RECEIVE_TIMEOUT_MS = 300_000
"""The timeout of one hop, from when its version is available or the last bytes were reported.

A relay reports received bytes each minute."""
SLOT_TIMEOUT_MS = RECEIVE_TIMEOUT_MS + 30_000
"""The timeout of an owed publish, from the last bytes.

A slot that they hold is free when their own timeout is over, and its relay has been restarted."""
STALLS_MAX = 3
"""The stalls in a row, of about 10 s each, after which a hop is taken to carry no weights."""
LAG_MS = 1_000  #: the delay of a transfer below which a hop is never slow, whatever its share
LAG_SHARE = 4  #: the divisor of a slow hop: it adds more than a quarter of its own duration
LAGS_MAX = 3
"""The slow transfers in a row that move a relay to the end: a passing cause has passed by then."""


# --- the chain --------------------------------------------------------------------------------


@handles(ev.RelayReady, valid=accept_any)
def on_relay_ready(ctx: Context, event: ev.RelayReady) -> None:
    """Put a relay into the chain; the head of the chain needs the trainer's current weights."""
    state, actor = ctx.state, ctx.state.members.actors[ctx.stamped.peer]
    if not ctx.mark_ready():
        return
    relay = RelayState(
        name=actor.name,
        node=actor.node,
        chain_address=event.chain_address,
        incarnation=actor.incarnation,
        ready_seq=ctx.stamped.seq,
    )
    state.members.relays[relay.name] = relay
    _heard_of(ctx, relay)
    state.members.relay_chain.append(relay.name)
    set_head(ctx)
    await_newest(ctx, relay)
    if state.evaluations.running is not None or state.versions.unfinished:
        pinning.send_pin(ctx, relay.name)
    if relay is master_relay(state):
        publishing.owe_republish(ctx)


def handle_relay_lost(ctx: Context, name: str) -> None:
    """Link the neighbors of a lost relay."""
    state = ctx.state
    relay = state.members.relays.get(name)
    if relay is not None:
        if relay is master_relay(state):  # weights on their way through it never arrive
            ctx.end_command(keys.PUBLISH)
            ctx.clear_timer(keys.WEIGHTS)
        indexes.remove_relay(state, relay)
        state.members.relay_chain.remove(name)
        ctx.clear_timer(keys.receive_timer(name))
        relink_chain(ctx)
        touch_replicas(ctx, relay)  # nothing newer waits now: they may admit again


def is_run_ending(state: State) -> bool:
    """Return whether the run ends: no process waits for weights any more."""
    return state.run.phase in (Phase.ENDING, Phase.STOPPING, Phase.ENDED)


def is_needed(state: State, role: str) -> bool:
    """Return whether the run needs a process of the role: while it ends, to write the ends."""
    still = ROLE_TABLE[role].joins_ending and state.run.phase == Phase.ENDING
    return still or not is_run_ending(state)


def set_head(ctx: Context) -> None:
    """Put the relay of the trainer's machine first, whenever the two became ready."""
    state, members = ctx.state, ctx.state.members
    trainer = indexes.find_trainer(state)
    if trainer is not None:
        members.relay_chain.sort(key=lambda name: members.relays[name].node != trainer.node)
    relink_chain(ctx)


def relink_chain(ctx: Context) -> None:
    """Send an order to every relay whose successor has changed."""
    state = ctx.state
    if is_run_ending(state):
        return
    for name, following in zip(
        state.members.relay_chain, [*state.members.relay_chain[1:], ""], strict=False
    ):
        relay = state.members.relays[name]
        if relay.successor != following:
            relay.successor = following
            successor = state.members.relays.get(following)
            _order_forward(ctx, relay, successor)
            if successor is not None:
                successor.slow_transfers = 0  # a new hop, perhaps a quick one


def _order_forward(ctx: Context, relay: RelayState, successor: RelayState | None) -> None:
    ctx.issue_command(
        cmd.ForwardWeights(
            to=relay.name,
            successor=successor.name if successor else "",
            address=successor.chain_address if successor else "",
            incarnation=successor.incarnation if successor else 0,
        ),
        key=keys.forward_key(relay.name),
        timeout_ms=LINK_TIMEOUT_MS,
    )


@handles(ev.RelayLinked, valid=accept_any)
def on_relay_linked(ctx: Context, event: ev.RelayLinked) -> None:
    """End the order for an established connection; an answer to an earlier order is late."""
    key = keys.forward_key(ctx.stamped.peer)
    outstanding = ctx.state.orders.commands.get(key)
    if outstanding is None or outstanding.command_id != event.command_id:
        return ctx.ignore("repeat")
    ctx.end_command(key)


def link_expired(ctx: Context, name: str, successor: str) -> None:
    """Restart a successor that was not connected in time, or the relay itself."""
    relay = ctx.state.members.relays[name]
    ctx.end_command(keys.forward_key(name))
    at_fault = successor if _is_successor_to_blame(relay) and successor else name
    target = successor or "no successor"
    ctx.restart_actor(at_fault, f"{name} could not be connected to {target} in time")


def _is_successor_to_blame(relay: RelayState) -> bool:
    """Count a hop that failed; return whether to restart its successor, which becomes the last one.

    A relay that fails with one successor after the other is restarted itself."""
    relay.failed_links += 1
    return relay.failed_links < UNLINKED_MAX


# --- held versions --------------------------------------------------------------------------------


def _has_valid_receipt(state: State, event: ev.WeightsReceived) -> bool:
    counted = is_count(event.num_bytes) and is_count(event.duration_ms)
    return counted and of_a_version(state, event) and are_allocated(state, event.held)


@handles(ev.WeightsReceived, valid=_has_valid_receipt)
def on_weights_received(ctx: Context, event: ev.WeightsReceived) -> None:
    """Record a version that a relay has; the replicas of its machine can pull it.

    With cut-through it may know of a version before the coordinator does."""
    state = ctx.state
    relay = state.members.relays.get(ctx.stamped.peer)
    if relay is None:
        return ctx.ignore("not-ready")
    news = event.version > relay.newest
    if event.kind == "full":
        load_sources.record_hop(state, relay.name, event.num_bytes, event.duration_ms)
    if not record_held_versions(ctx, relay, event.version, event.digest, event.held):
        return ctx.ignore("repeat")
    if relay.newest == event.version and news:
        if position := state.members.relay_chain.index(relay.name):
            state.members.relays[state.members.relay_chain[position - 1]].failed_links = 0
        _judge_speed(ctx, relay, event)
        ctx.clear_timer(keys.receive_timer(relay.name))
        await_newest(ctx, relay)
    _move_slow(ctx)


def record_held_versions(
    ctx: Context, relay: RelayState, version: int, digest: str, held: tuple[int, ...]
) -> bool:
    """Record the versions that a relay reports; return whether any was new.

    A relay with other bytes under the number of the newest version is restarted."""
    state = ctx.state
    if version == state.versions.newest and digest != state.versions.newest_digest:
        return restart_for_other_bytes(ctx, relay, digest)
    _heard_of(ctx, relay)
    changed = indexes.set_held(state, relay, list(held))
    if version > relay.newest:
        changed = True
        relay.newest, relay.newest_digest = version, digest
        relay.arrived[version] = ctx.stamped.time_ns
        indexes.update_relay(state, relay)
        touch_replicas(ctx, relay)
    relay.arrived = {v: at for v, at in relay.arrived.items() if v in held}
    return changed


def _heard_of(ctx: Context, relay: RelayState) -> None:
    """Allow a failed source that responds again to be asked: lost work may wait for it."""
    failed = ctx.state.versions.failed_sources
    if relay.name in failed:
        del failed[relay.name]
        ctx.touch_all()


def restart_for_other_bytes(ctx: Context, relay: RelayState, digest: str) -> bool:
    """Restart a relay with other bytes; return False if that was ordered already."""
    newest, published = ctx.state.versions.newest, ctx.state.versions.newest_digest
    reason = f"its version {newest} has digest {digest}, but {published} was published"
    return ctx.restart_actor(relay.name, reason)


def touch_replicas(ctx: Context, relay: RelayState) -> None:
    """Touch the replicas that pull from this relay: they have another choice now."""
    for name in indexes_of(ctx.state).served_by(relay.name):
        ctx.touch_replica(name)


def await_newest(ctx: Context, relay: RelayState) -> None:
    """Set a time in which a relay must have the newest published version."""
    state, timer = ctx.state, keys.receive_timer(relay.name)
    if (
        relay.newest < state.versions.newest
        and relay is not master_relay(state)
        and timer not in state.orders.timers
    ):
        ctx.set_timer(timer, RECEIVE_TIMEOUT_MS)


def receive_expired(ctx: Context, name: str) -> None:
    """Restart a relay that lacks the newest version while its predecessor has it.

    A relay whose predecessor lacks it, too, continues to wait; without a predecessor, the trainer's
    machine has to get its relay back first."""
    state = ctx.state
    relay = state.members.relays[name]
    position = state.members.relay_chain.index(name)
    before = state.members.relays[state.members.relay_chain[position - 1]] if position else None
    if before is not None and before.newest >= state.versions.newest:
        ctx.restart_actor(
            name, f"version {state.versions.newest} has not come from {before.name} in time"
        )
    await_newest(ctx, relay)


def _has_valid_measurements(state: State, event: ev.TransferProblem) -> bool:
    figures = (event.num_bytes, event.duration_ms, event.left_bytes, event.stalls)
    return all(map(is_count, figures))


@handles(ev.TransferProblem, valid=_has_valid_measurements)
def on_transfer_problem(ctx: Context, event: ev.TransferProblem) -> None:
    """Record trouble that the relays have handled, and repair a hop that they cannot.

    The timeout of a version restarts whenever bytes of it are reported."""
    name = ctx.stamped.peer
    timer = keys.receive_timer(name)
    if name not in ctx.state.members.relays:
        return ctx.ignore("not-ready")
    if event.stalls >= STALLS_MAX:
        _repair_hop(ctx, ctx.state.members.relays[name], event)
    publish = keys.deadline_timer(keys.PUBLISH)
    if (
        event.num_bytes and publish in ctx.state.orders.timers
    ):  # the received bytes may hold its slot
        ctx.set_timer(publish, SLOT_TIMEOUT_MS)
    if 0 <= event.version < ctx.state.members.relays[name].newest:
        _older_comes(ctx, event)
    elif event.num_bytes and timer in ctx.state.orders.timers:
        ctx.set_timer(timer, RECEIVE_TIMEOUT_MS)
        for replica in indexes_of(ctx.state).served_by(name):
            if indexes.is_streaming(ctx.state, replica):
                ctx.set_timer(keys.deadline_timer(keys.pull_key(replica)), RECEIVE_TIMEOUT_MS)


def _repair_hop(ctx: Context, relay: RelayState, event: ev.TransferProblem) -> None:
    """Restart a relay that is reached, but gets no weights: the chain continues without it.

    The head is to blame only if it cannot feed another successor either."""
    members = ctx.state.members
    if event.relay != relay.successor or keys.restart_key(event.relay) in ctx.state.orders.commands:
        return
    blamed = _is_successor_to_blame(relay) or len(members.relay_chain) <= 2
    ctx.restart_actor(
        relay.successor if blamed else relay.name,
        f"{event.stalls} connections from {relay.name} to {relay.successor} in a row were "
        f"established and then stalled ({event.detail}): the network between {relay.node} and "
        f"{members.relays[relay.successor].node} may drop large packets; compare their MTU",
    )


def _older_comes(ctx: Context, event: ev.TransferProblem) -> None:
    """Restart the timeout of fetched versions whenever bytes of them are reported."""
    for command in load_sources.list_fetches(ctx.state) if event.num_bytes else ():
        here = ctx.state.members.replicas[command.to].relay == ctx.stamped.peer
        if here and command.version == event.version:
            ctx.set_timer(keys.deadline_timer(keys.pull_key(command.to)), RECEIVE_TIMEOUT_MS)


# --- slow relays ----------------------------------------------------------------------------------


def _judge_speed(ctx: Context, relay: RelayState, event: ev.WeightsReceived) -> None:
    """Count the transfers in a row that this relay has held up.

    With cut-through a hop ends shortly after the one before it; any lag is time in which its
    predecessor may have received newer versions. The first hop follows only the trainer, which
    receives nothing: a full version is compared with the fastest hop of the run instead."""
    state = ctx.state
    position = state.members.relay_chain.index(relay.name)
    before = state.members.relays[state.members.relay_chain[position - 1]] if position else None
    if before is None or event.version not in before.arrived:
        return
    if before is not master_relay(state):
        lag_ms = (ctx.stamped.time_ns - before.arrived[event.version]) // 1_000_000
    elif event.kind == "full" and state.versions.fastest_hop >= 0:
        lag_ms = event.duration_ms - state.versions.fastest_hop * event.num_bytes // 1_000_000_000
    else:
        lag_ms = 0
    if event.kind == "full" and event.num_bytes:
        pace = event.duration_ms * 1_000_000_000 // event.num_bytes
        state.versions.fastest_hop = (
            pace if state.versions.fastest_hop < 0 else min(pace, state.versions.fastest_hop)
        )
    slow = lag_ms > LAG_MS and lag_ms * LAG_SHARE > event.duration_ms
    relay.slow_transfers = relay.slow_transfers + 1 if slow else 0


def _move_slow(ctx: Context) -> None:
    """Move a relay that has held up several transfers to the end of the chain.

    Also during other transfers: a relay that is slower than versions are made would otherwise hold
    up all behind it for the rest of the run, and one that gets another predecessor continues with
    the chunks it has."""
    state = ctx.state
    chain = [state.members.relays[name] for name in state.members.relay_chain]
    slow = next((relay for relay in chain[:-1] if relay.slow_transfers >= LAGS_MAX), None)
    if slow is not None:
        state.members.relay_chain.remove(slow.name)
        state.members.relay_chain.append(slow.name)
        relink_chain(ctx)


# --- machines ---------------------------------------------------------------------------------


def name_of(role: str, node: str) -> str:
    """Return the name of a machine's only process of a role; empty for an invalid machine name."""
    try:
        return ids.actor_name(role, node, 0)
    except ValueError:
        return ""


def can_start(state: State) -> bool:
    """Return whether the start waits neither for a replica nor for a host of its sessions."""
    joined = map(state.members.is_actor_alive, indexes_of(state).roles.get(Role.ROLLOUT, ()))
    return _has_host(state) and (any(joined) or can_work(state))


def _has_host(state: State) -> bool:
    """Return whether sessions have a host, or will have one again, if any are needed."""
    hosts = indexes_of(state).roles.get(Role.AGENT, ())
    awaited = (keys.rejoin_timer(name) in state.orders.timers for name in hosts)
    needed = state.settings.has_environment
    return not needed or any(awaited) or any(map(state.members.is_actor_alive, hosts))


def can_work(state: State) -> bool:
    """Return whether a replica can work, now or once it or its machine's relay is back.

    It also needs a host for its sessions, which may still be starting."""
    if keys.START not in state.orders.timers and not _has_host(state):
        return False
    replicas = indexes_of(state).roles.get(Role.ROLLOUT, ())
    if state.run.phase == Phase.STARTING and any(map(state.members.is_actor_alive, replicas)):
        return True
    if any(
        replica.relay in state.members.relays
        or keys.rejoin_timer(replica.relay) in state.orders.timers
        for replica in state.members.replicas.values()
        if state.members.is_actor_alive(replica.name)
    ):
        return True
    return any(keys.rejoin_timer(name) in state.orders.timers for name in replicas)


def is_trainer_relay(state: State, name: str) -> bool:
    """Return whether this is the relay of the trainer's machine, the source of new weights."""
    trainer = indexes.find_trainer(state)
    return trainer is not None and name == ids.actor_name(Role.RELAY, trainer.node, 0)
