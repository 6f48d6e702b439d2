"""Random faults: those that recur at random times, one function each.

Reads   the world: which processes live; per kind a stream that draws the target and the severity
Writes  the world, through Effects: processes die, pause and slow down, links are cut and clogged
Gives   RECURRING, SILENCES, EXITS, TRAINER, STORE, HOSTS and RUN, kind -> strike

Faults plans when each one strikes. A process that a run needs in order to continue is only
disturbed for less than its lease, except for a relay, which its node restarts, and for a node,
whose processes continue without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar.events import events as ev
from laminar.events.base import COORDINATOR
from laminar.names import exit_codes, failpoint_names, ids
from tools.simulator.faults.effects import LOST, Effects
from tools.simulator.faults.targeted import HELD
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds
from tools.simulator.scheduler import MS

Strike = Callable[[Effects, random.Random], None]
Blow = Callable[[Effects, random.Random, SimProcess], None]
SHORT = 0.3  #: part of the short lease for which a process that must not be lost may be cut off
STORE_FULL_S = 10.0  #: longest fill of the store's disk, well below coordinator.disk_full_timeout_s
BEYOND, LONGEST = 0.3, 1.5
"""Part of the silences of nodes that exceed their lease; length of the longest one in leases."""


# --- a replica or a relay -------------------------------------------------------------------------


def _one(role: str, blow: Blow) -> Strike:
    """Return a fault that strikes a random process of this role."""

    def strike(faults: Effects, chance: random.Random) -> None:
        processes = [p for p in faults.world.processes.values() if p.role == role]
        alive = [p for p in processes if p.alive and not p.stopping]
        if alive:
            blow(faults, chance, chance.choice(alive))

    return strike


def _dies(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    faults.harm(process.name, LOST)
    process.die(exit_codes.KILLED)


def _replaced(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Replace a process before any other has noticed that the old one died."""
    faults.harm(process.name, LOST)
    process.replace()


def _paused(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Pause a process for up to three leases: it wakes as a zombie, unless its node ended it."""
    faults.pause(process, faults.lease_s * chance.uniform(0.5, 3.0))


def _slow(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Slow a process down for a while."""
    faults.speed(process, chance.choice([2.0, 5.0, 10.0, 50.0]))
    faults.later(chance.uniform(1, 20), faults.speed, process, 1.0)


def _leaves(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    if process.welcomed and not process.paused:
        faults.harm(process.name, LOST)
        process.emit(ev.ActorLeft())
        process.call_later(10 * MS, process.die, exit_codes.FAILED)


def _complains(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    if process.welcomed and not process.paused:
        faults.harm(process.name, LOST)
        process.fail("out of memory")


# --- several at once, or any other ----------------------------------------------------------------


def _rack_lost(faults: Effects, chance: random.Random) -> None:
    """Kill a quarter of the replicas at the same instant."""
    alive = [p for p in faults.world.rollouts if p.alive]
    for process in chance.sample(alive, len(alive) // 4):
        faults.harm(process.name, LOST)
        process.die(exit_codes.KILLED)


def _single_paused(faults: Effects, chance: random.Random) -> None:
    """Pause a process other than a replica, but not long enough for it to be lost."""
    process = chance.choice([p for p in faults.world.processes.values() if p.role != "rollout"])
    faults.pause(process, faults.lease_s * SHORT * chance.random())


# --- the coordinator ------------------------------------------------------------------------------


def _coordinator_killed(faults: Effects, chance: random.Random) -> None:
    faults.world.coordinator.kill()


def _coordinator_paused(faults: Effects, chance: random.Random) -> None:
    faults.world.coordinator.pause()
    faults.later(faults.lease_s * chance.uniform(0.1, 3.0), faults.world.coordinator.resume)


def _coordinator_cut(faults: Effects, chance: random.Random) -> None:
    """Cut the machine's power in one of the next disk calls."""
    faults.disk_fault = "coordinator-cut"


def _disk_error(faults: Effects, chance: random.Random) -> None:
    faults.disk_fault = "disk-error"


def _disk_full(faults: Effects, chance: random.Random) -> None:
    _fill(faults, chance.uniform(0.1, 5.0))


def _fill(faults: Effects, duration_s: float) -> None:
    def has_room() -> None:
        faults.disk_full = faults.full_for_good

    faults.disk_full = True
    faults.later(duration_s, has_room)


def _clock_step(faults: Effects, chance: random.Random) -> None:
    """Step the wall clock by up to an hour; the monotonic clock is unaffected."""
    faults.world.coordinator.wall_offset_ns += seconds(chance.uniform(-3600, 3600))


# --- the network ----------------------------------------------------------------------------------


def _link(faults: Effects, chance: random.Random) -> tuple[str, str, float]:
    """Draw the two ends of a link, and for how long it may be cut."""
    process = chance.choice(list(faults.world.processes.values()))
    replica = process.role == "rollout"
    if replica and chance.random() < 0.3:
        other = chance.choice(["store-0", ids.actor_name("relay", process.node, 0)])
        return process.name, other, faults.lease_s * chance.uniform(0.1, 2.0)
    if process.role == "agent":
        return process.name, "store-0", faults.lease_s * chance.uniform(0.1, 2.0)
    if process.role == "relay" and chance.random() < 0.5:
        relays = [p.name for p in faults.world.processes.values() if p.role == "relay"]
        return process.name, chance.choice(relays), faults.lease_s * chance.uniform(0.1, 2.0)
    longest = 2.0 if replica else SHORT
    return process.name, COORDINATOR, faults.lease_s * chance.uniform(0.05, longest)


def _partition(faults: Effects, chance: random.Random) -> None:
    one, other, duration_s = _link(faults, chance)
    faults.cut(one, other, duration_s)
    faults.cut(other, one, duration_s)


def _partition_one_way(faults: Effects, chance: random.Random) -> None:
    one, other, duration_s = _link(faults, chance)
    if chance.random() < 0.5:
        one, other = other, one
    faults.cut(one, other, duration_s)


def _flapping(faults: Effects, chance: random.Random) -> None:
    one, other, duration_s = _link(faults, chance)
    for i in range(5):
        faults.later(2 * i * duration_s / 10, faults.cut, one, other, duration_s / 10)
        faults.later(2 * i * duration_s / 10, faults.cut, other, one, duration_s / 10)


def _swizzle_clog(faults: Effects, chance: random.Random) -> None:
    """Clog connections one after the other, and unclog them in another order."""
    names = list(faults.world.processes)
    chosen = chance.sample(names, max(1, len(names) // 3))
    step_s = faults.lease_s * SHORT / (2 * len(chosen))
    order = chance.sample(chosen, len(chosen))
    for i, name in enumerate(chosen):
        faults.later(i * step_s, _clog, faults, name)
    for i, name in enumerate(order):
        faults.later((len(chosen) + i) * step_s, _unclog, faults, name)


def _clog(faults: Effects, name: str) -> None:
    if not faults.healed:
        faults.harm(name)
        faults.world.network.clog(name, COORDINATOR)
        faults.world.network.clog(COORDINATOR, name)


def _unclog(faults: Effects, name: str) -> None:
    faults.world.network.unclog(name, COORDINATOR)
    faults.world.network.unclog(COORDINATOR, name)


def _connection_breaks(faults: Effects, chance: random.Random) -> None:
    """Break a connection: what is in flight is lost; the process reconnects to the coordinator."""
    process = chance.choice(list(faults.world.processes.values()))
    if process.alive:
        faults.harm(process.name)
        process.disconnect()
        faults.later(chance.uniform(0, 0.5), faults.world.reconnect, process)


# --- processes with a long lease ------------------------------------------------------------------


def _nodes(faults: Effects) -> list[SimProcess]:
    return [p for p in faults.world.processes.values() if p.role == "node"]


def _node_silent(faults: Effects, chance: random.Random) -> None:
    """Pause a node beyond a short lease, sometimes also beyond its own; its processes continue."""
    node = chance.choice(_nodes(faults))
    shortest_s, lease_s = faults.lease_s, faults.lease_of_s("node")
    beyond = chance.random() < BEYOND
    faults.pause(node, chance.uniform(lease_s if beyond else shortest_s, LONGEST * lease_s))


def _machine_stands_still(faults: Effects, chance: random.Random) -> None:
    """Pause a node and others of its machine for longer than the long lease.

    The trainer is exempt if it could not come back.
    """
    node = chance.choice(_nodes(faults))
    found = [child for child in faults.world.children_of(node.name) if child.alive]
    able = [c for c in found if c.role != "trainer" or faults.may_lose_trainer(c)]
    others = chance.sample(able, chance.randint(min(1, len(able)), len(able)))
    duration_s = faults.lease_of_s("node") * chance.uniform(1.1, LONGEST)
    for process in (node, *others):
        faults.pause(process, duration_s)


def _node_dies(faults: Effects, chance: random.Random) -> None:
    """Kill a node: its processes continue, and are not restarted."""
    faults.lose_node(chance.choice(_nodes(faults)))


def _machine_restarts(faults: Effects, chance: random.Random) -> None:
    """Restart a machine, as after a brief power loss: all of it dies, then a new node starts."""
    faults.restart_machine(chance.choice(_nodes(faults)))


def _single_silent(faults: Effects, chance: random.Random) -> None:
    """Pause the store or the trainer for longer than a short lease and shorter than its own."""
    process = faults.world.processes[chance.choice(["store-0", "trainer-0"])]
    faults.pause(process, chance.uniform(faults.lease_s, HELD * faults.lease_of_s(process.role)))


def _relay_cut_off(faults: Effects, chance: random.Random) -> None:
    """Cut a relay from the coordinator for longer than its lease, never that of the trainer.

    Its neighbors in the chain still reach it, and one of them is ordered to do without it.
    """
    relays = [p for p in faults.world.processes.values() if p.role == "relay"][1:]
    if relays:
        relay, duration_s = chance.choice(relays), faults.lease_s * chance.uniform(1.2, 2.0)
        faults.cut(relay.name, COORDINATOR, duration_s)
        faults.cut(COORDINATOR, relay.name, duration_s)


RECURRING: dict[str, Strike] = {
    "replica-dies": _one("rollout", _dies),
    "replica-leaves": _one("rollout", _leaves),
    "replica-complains": _one("rollout", _complains),
    "replica-replaced": _one("rollout", _replaced),
    "replica-paused": _one("rollout", _paused),
    "replica-slow": _one("rollout", _slow),
    "rack-lost": _rack_lost,
    "relay-dies": _one("relay", _dies),
    "relay-replaced": _one("relay", _replaced),
    "relay-paused": _one("relay", _paused),
    "relay-slow": _one("relay", _slow),
    "single-paused": _single_paused,
    "coordinator-killed": _coordinator_killed,
    "coordinator-cut": _coordinator_cut,
    "coordinator-paused": _coordinator_paused,
    "disk-error": _disk_error,
    "disk-full": _disk_full,
    "clock-step": _clock_step,
    "partition": _partition,
    "partition-one-way": _partition_one_way,
    "flapping": _flapping,
    "swizzle-clog": _swizzle_clog,
    "connection-breaks": _connection_breaks,
}
# --- the coordinator's own ends -------------------------------------------------------------------


def _disk_full_long(faults: Effects, chance: random.Random) -> None:
    """Fill the disk for several coordinators, but not until the supervisor gives up."""
    _fill(faults, chance.uniform(5.0, 0.5 * faults.world.config.coordinator.disk_full_timeout_s))


def _disk_full_for_good(faults: Effects, chance: random.Random) -> None:
    faults.disk_full = faults.full_for_good = True


# --- the store ------------------------------------------------------------------------------------


def _store_full(faults: Effects, chance: random.Random) -> None:
    """Fill the store's disk for a while: writers wait."""
    database = faults.world.database

    def has_room() -> None:
        database.full = False

    faults.harm("store")
    database.full = True
    faults.later(chance.uniform(0.1, STORE_FULL_S), has_room)


def _store_silent(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Pause the store for longer than its lease: its node is ordered to restart it."""
    faults.pause(process, faults.lease_of_s(process.role) * chance.uniform(1.0, LONGEST))


# --- the trainer ----------------------------------------------------------------------------------


def _trainer(blow: Blow) -> Strike:
    """Return a fault that strikes the trainer if it can come back from a checkpoint."""

    def strike(faults: Effects, chance: random.Random) -> None:
        process = faults.world.processes["trainer-0"]
        if faults.may_lose_trainer(process):
            blow(faults, chance, process)

    return strike


def _silent(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Pause a process beyond its lease: it wakes as a zombie, unless its node ended it."""
    faults.pause(process, faults.lease_of_s(process.role) * chance.uniform(1.0, 2.0))


def _dies_there(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Let a process die at a random failpoint."""
    faults.dies_next, faults.unheard_next = chance.choice(failpoint_names.TRAINER), False


def _dies_unheard(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """Let it die after it named a checkpoint whose step the coordinator has not heard of."""
    faults.dies_next, faults.unheard_next = "trainer-checkpoint-named", True


def _member_lost(faults: Effects, chance: random.Random, process: SimProcess) -> None:
    """End the trainer as it does without a rank; the next one waits for the node's ranks to end."""
    _complains(faults, chance, process)
    faults.load_longer_s = chance.uniform(0.0, 2.0) * faults.lease_of_s(process.role)


TRAINER: dict[str, Strike] = {
    "trainer-dies": _trainer(_dies),
    "trainer-dies-there": _trainer(_dies_there),
    "trainer-dies-unheard": _trainer(_dies_unheard),
    "trainer-leaves": _trainer(_leaves),
    "trainer-complains": _trainer(_complains),
    "trainer-replaced": _trainer(_replaced),
    "trainer-silent": _trainer(_silent),
    "trainer-member-lost": _trainer(_member_lost),
}
# --- all processes --------------------------------------------------------------------------------


def _run_dies(faults: Effects, chance: random.Random) -> None:
    """Cut the power: all processes die at once, the coordinator too; the user restarts the run."""
    if faults.can_begin_again:
        faults.world.begin_again()


def _run_pauses(faults: Effects, chance: random.Random) -> None:
    """Pause the run as a batch system does that preempts all processes and restarts it later."""
    if faults.can_begin_again:
        response_timeout_ms = chance.choice([0, 1_000, 30_000])
        pause = ev.DrainRequested(
            reason="SIGUSR1", pause=True, response_timeout_ms=response_timeout_ms
        )
        faults.world.coordinator.report(pause)


HOSTS: dict[str, Strike] = {
    "host-dies": _one("agent", _dies),
    "host-leaves": _one("agent", _leaves),
    "host-replaced": _one("agent", _replaced),
    "host-paused": _one("agent", _paused),
    "host-slow": _one("agent", _slow),
}
RUN: dict[str, Strike] = {"run-dies": _run_dies, "run-pauses": _run_pauses}
EXITS: dict[str, Strike] = {
    "disk-full-long": _disk_full_long,
    "disk-full-for-good": _disk_full_for_good,
}
STORE: dict[str, Strike] = {
    "store-full": _store_full,
    "store-dies": _one("store", _dies),
    "store-replaced": _one("store", _replaced),
    "store-silent": _one("store", _store_silent),
}
SILENCES: dict[str, Strike] = {
    "node-silent": _node_silent,
    "machine-stands-still": _machine_stands_still,
    "node-dies": _node_dies,
    "machine-restarts": _machine_restarts,
    "single-silent": _single_silent,
    "relay-cut-off": _relay_cut_off,
}
