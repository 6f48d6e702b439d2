"""Checks of relays: a reported version is in a slot, intact, and a late transfer ends.

Reads   reports of relays and orders to them; their version tables and slots; the coordinator's
        state when a timer has fired
Raises  Violation
"""

from __future__ import annotations

from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.weights.version.hashes import WeightsCorrupt, verify_weights
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World


def reported(world: World, relay: str, event: Event) -> None:
    """Check held_is_published: the relay holds the version it reports, as the trainer made it."""
    if not isinstance(event, ev.WeightsReceived | ev.WeightsPublished):
        return
    what = f"{relay} reports version {event.version}"
    machine = world.machine_of(relay)
    copy = machine.versions.get(event.version)
    if copy is None or not copy.complete or copy.digest != event.digest:
        raise Violation("held_is_published", f"{what}, but does not have it")
    try:
        verify_weights(machine.slots.view(copy.slot), copy.get_manifest())
    except WeightsCorrupt as error:
        raise Violation("held_is_published", f"{what}: {error}") from error


def obeyed(world: World, relay: str, command: Command) -> None:
    """Count in the coverage an order to pin a version that the relay does not have yet."""
    if not isinstance(command, cmd.PinVersion) or command.version < 0:
        return
    if command.version not in world.machine_of(relay).versions.get_complete_digests():
        world.coverage.hit("relay:pin-of-a-version-not-here")


def late_transfer_has_an_end(stamped: Stamped, state: State) -> None:
    """Check that a relay that misses its predecessor's version past the timeout is restarted."""
    members = state.members
    if not isinstance(stamped.event, ev.TimerFired):
        return
    kind, name = keys.parse_timer(stamped.event.timer)
    overdue = kind == keys.TimerKind.RECEIVE and name in members.relay_chain
    position = members.relay_chain.index(name) if overdue else 0
    if not position or keys.restart_key(name) in state.orders.commands:
        return
    relay, before = (members.relays[name], members.relays[members.relay_chain[position - 1]])
    if relay.newest < state.versions.newest <= before.newest:
        newest = state.versions.newest
        what = f"version {newest} did not arrive from {before.name}, and no process acts"
        raise Violation("late_transfer_has_an_end", what, name)
