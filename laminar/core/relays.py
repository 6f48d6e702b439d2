"""Relays: the chain in which weights pass from machine to machine.

Reads   RelayReady, WeightsReceived, RelayLinked, TransferTrouble; losses of relays
Writes  state.relays, state.chain, relay.held, relay.successor
Emits   ForwardWeights, PinVersion, RestartActor

The relay of the trainer's machine is the head, since every version begins there. The others follow
in the order in which they became ready; one that repeatedly holds up a transfer goes to the end. A
relay knows only its successor, so a loss costs one command: its predecessor feeds its successor,
which names the chunks that it lacks. Nobody else notices.

Each relay has what its predecessor has, within a time; whoever has not is restarted. The head has
what the trainer made, or it is owed (core/publishing.py).
"""

from __future__ import annotations

from laminar import ids
from laminar.core import lookup
from laminar.core.state import ENDED, ENDING, STARTING, STOPPING, Actor, Relay, State
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev

LINK_TIMEOUT_MS = 30_000
"""One connection between two machines; its greeting is a few messages."""
UNLINKED_MAX = 2
"""A relay that reaches neither of two successors is at fault itself."""
RECEIVE_TIMEOUT_MS = 300_000
"""One copy of the model between two machines, as for a pull; a chain adds little to one hop."""
LAG_MS = 1_000
"""A hop that holds up a transfer by less is not slow, whatever its share is."""
LAG_SHARE = 4
"""A hop is slow when it adds more than a quarter of its own duration."""
LAGS_MAX = 3
"""So many slow transfers in a row move a relay to the end: a passing cause has passed by then."""


# --- the chain --------------------------------------------------------------------------------


def join(turn: Turn, actor: Actor, bulk: str) -> Relay:
    """A relay is ready: it takes its place and is fed."""
    state = turn.state
    relay = Relay(
        name=actor.name,
        node=actor.node,
        bulk=bulk,
        incarnation=actor.incarnation,
        ready_seq=turn.stamped.seq,
    )
    state.relays[relay.name] = relay
    state.chain.append(relay.name)
    turn.clear_timer(f"rejoin:{relay.name}")
    set_head(turn)
    await_newest(turn, relay)
    if state.evaluation is not None:
        turn.command(cmd.PinVersion(to=relay.name, version=state.evaluation.version))
    return relay


def leave(turn: Turn, name: str) -> None:
    """A relay is lost: the one before it feeds the one behind it; it has a time to come back."""
    state = turn.state
    relay = state.relays.get(name)
    if relay is not None:
        if relay is state.master():  # what was on its way through it never arrives
            turn.done("publish")
            turn.clear_timer("weights")
        lookup.remove_relay(state, relay)
        state.chain.remove(name)
        turn.clear_timer(f"receive:{name}")
        relink(turn)
        touch_replicas(turn, relay)  # nothing newer waits for them now: they may admit again
    if not ending(state):
        turn.set_timer(f"rejoin:{name}", state.settings.start_timeout_ms)


def ending(state: State) -> bool:
    """The run ends: nobody waits for weights any more."""
    return state.phase in (ENDING, STOPPING, ENDED)


def set_head(turn: Turn) -> None:
    """The relay of the trainer's machine comes first, whenever the two became ready."""
    state = turn.state
    trainer = state.the("trainer")
    if trainer is not None:
        state.chain.sort(key=lambda name: state.relays[name].node != trainer.node)
    relink(turn)


def relink(turn: Turn) -> None:
    """Tell every relay whose successor is another one now."""
    state = turn.state
    if ending(state):
        return
    for name, following in zip(state.chain, [*state.chain[1:], ""], strict=False):
        relay = state.relays[name]
        if relay.successor != following:
            relay.successor = following
            successor = state.relays.get(following)
            _forward(turn, relay, successor)
            if successor is not None:
                successor.lags = 0  # another hop, perhaps a quick one


def _forward(turn: Turn, relay: Relay, successor: Relay | None) -> None:
    turn.command(
        cmd.ForwardWeights(
            to=relay.name,
            successor=successor.name if successor else "",
            address=successor.bulk if successor else "",
            incarnation=successor.incarnation if successor else 0,
        ),
        key=f"forward:{relay.name}",
        timeout_ms=LINK_TIMEOUT_MS,
    )


def on_relay_linked(turn: Turn, event: ev.RelayLinked) -> None:
    """The connection stands; an answer to an earlier order is late."""
    key = f"forward:{turn.stamped.peer}"
    outstanding = turn.state.commands.get(key)
    if outstanding is None or outstanding.command_id != event.command_id:
        return turn.ignore("repeat")
    turn.done(key)
    turn.state.relays[turn.stamped.peer].unlinked = 0


def link_expired(turn: Turn, name: str, successor: str) -> None:
    """No connection in time: the successor is restarted, and comes back as the last one.

    A relay that fails with one successor after the other is restarted itself.
    """
    relay = turn.state.relays[name]
    turn.done(f"forward:{name}")
    relay.unlinked += 1
    at_fault = successor if successor and relay.unlinked < UNLINKED_MAX else name
    turn.restart(at_fault, f"{name} could not be connected to {successor or 'nobody'} in time")


# --- what they hold ---------------------------------------------------------------------------


def on_weights_received(turn: Turn, event: ev.WeightsReceived) -> None:
    """A relay has a version from its predecessor, and the replicas of its machine can pull it.

    With cut-through it may know of a version before the coordinator does.
    """
    state = turn.state
    relay = state.relays.get(turn.stamped.peer)
    if relay is None:
        return turn.ignore("not-ready")
    news = event.version > relay.newest
    if not hold(turn, relay, event.version, event.digest, event.held):
        return turn.ignore("repeat")
    if relay.newest == event.version and news:
        _judge_speed(turn, relay, event)
        turn.clear_timer(f"receive:{relay.name}")
        await_newest(turn, relay)
    _move_slow(turn)


def hold(turn: Turn, relay: Relay, version: int, digest: str, held: tuple[int, ...]) -> bool:
    """Enter what a relay says that it has; False if all of it was known.

    Other bytes under the number of the newest version are nothing to pull: it starts afresh.
    """
    state = turn.state
    if version == state.newest and digest != state.newest_digest:
        return restart_for_other_bytes(turn, relay, digest)
    changed = lookup.set_held(state, relay, list(held))
    if version > relay.newest:
        changed = True
        relay.newest, relay.newest_digest = version, digest
        relay.arrived[version] = turn.stamped.time_ns
        lookup.relay_changed(state, relay)
        touch_replicas(turn, relay)
    relay.arrived = {v: at for v, at in relay.arrived.items() if v in held}
    return changed


def restart_for_other_bytes(turn: Turn, relay: Relay, digest: str) -> bool:
    """False if that was decided before."""
    newest, published = turn.state.newest, turn.state.newest_digest
    reason = f"its version {newest} has digest {digest}, but {published} was published"
    return turn.restart(relay.name, reason)


def touch_replicas(turn: Turn, relay: Relay) -> None:
    """Those that pull from this relay have another choice now."""
    for name in turn.state.lookup.served_by(relay.name):
        turn.touch(name)


def await_newest(turn: Turn, relay: Relay) -> None:
    """What a relay lacks of the published versions it must have within a time."""
    state, timer = turn.state, f"receive:{relay.name}"
    if relay.newest < state.newest and relay is not state.master() and timer not in state.timers:
        turn.set_timer(timer, RECEIVE_TIMEOUT_MS)


def receive_expired(turn: Turn, name: str) -> None:
    """The newest version did not come: whoever could have had it from its predecessor is restarted.

    Who waits because its predecessor does goes on waiting; without one, the trainer's machine has
    to get its relay back first.
    """
    state = turn.state
    relay = state.relays[name]
    position = state.chain.index(name)
    before = state.relays[state.chain[position - 1]] if position else None
    if before is not None and before.newest >= state.newest:
        turn.restart(name, f"version {state.newest} has not come from {before.name} in time")
    await_newest(turn, relay)


def on_transfer_trouble(turn: Turn, event: ev.TransferTrouble) -> None:
    """Dealt with already; noted for whoever looks at this machine."""
    relay = turn.state.relays.get(turn.stamped.peer)
    if relay is None:
        return turn.ignore("not-ready")
    relay.trouble = event.kind


# --- slow ones --------------------------------------------------------------------------------


def _judge_speed(turn: Turn, relay: Relay, event: ev.WeightsReceived) -> None:
    """Count the transfers in a row that this relay has held up.

    With cut-through a hop ends shortly after the one before it; what it adds, its predecessor was
    quicker by, which may have got newer versions since. The first hop has only the trainer before
    it, which receives nothing: a full version is compared with the quickest hop of the run instead.
    """
    state = turn.state
    position = state.chain.index(relay.name)
    before = state.relays[state.chain[position - 1]] if position else None
    if before is None or event.version not in before.arrived:
        return
    if before is not state.master():
        lag_ms = (turn.stamped.time_ns - before.arrived[event.version]) // 1_000_000
    elif event.kind == "full" and state.fastest >= 0:
        lag_ms = event.duration_ms - state.fastest * event.num_bytes // 1_000_000_000
    else:
        lag_ms = 0
    if event.kind == "full" and event.num_bytes:
        pace = event.duration_ms * 1_000_000_000 // event.num_bytes
        state.fastest = pace if state.fastest < 0 else min(pace, state.fastest)
    slow = lag_ms > LAG_MS and lag_ms * LAG_SHARE > event.duration_ms
    relay.lags = relay.lags + 1 if slow else 0


def _move_slow(turn: Turn) -> None:
    """A relay that has held up several transfers goes to the end.

    Also while others are under way: a relay that is slower than versions are made would otherwise
    hold up everybody behind it for good, and whoever has another predecessor goes on with what it
    has.
    """
    state = turn.state
    chain = [state.relays[name] for name in state.chain]
    slow = next((relay for relay in chain[:-1] if relay.lags >= LAGS_MAX), None)
    if slow is not None:
        state.chain.remove(slow.name)
        state.chain.append(slow.name)
        relink(turn)


# --- machines ---------------------------------------------------------------------------------


def can_work(state: State) -> bool:
    """Some replica lives whose machine has a relay or may get it back, or may itself come back."""
    if state.phase == STARTING and any(
        map(state.actor_alive, state.lookup.roles.get("rollout", ()))
    ):
        return True
    if any(
        replica.relay in state.relays or f"rejoin:{replica.relay}" in state.timers
        for replica in state.replicas.values()
        if state.actor_alive(replica.name)
    ):
        return True
    return any(timer.startswith("rejoin:rollout") for timer in state.timers)


def indispensable(state: State, name: str) -> bool:
    """The relay of the trainer's machine: without it no new weights come to anybody."""
    trainer = state.the("trainer")
    return trainer is not None and name == ids.actor_name("relay", trainer.node, 0)
