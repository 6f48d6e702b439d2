"""Planes of relays in virtual time: versions, chunks and connections over simulated lines."""

from __future__ import annotations

import itertools

from laminar.weights.chain.core import PlaneOptions
from laminar.weights.chain.reports import NeighbourDown, Received, Report, SlotWanted, Trouble
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import build_manifest, verify_weights
from tools.kit.sim_worlds import calm
from tools.simulator.machine.memory import SimArena
from tools.simulator.machine.relay import SimMachine, SimPlane
from tools.simulator.machine.versions import CHUNK_BYTES, VERSION_BYTES
from tools.simulator.run import make_world
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds
from tools.simulator.world import World

SPECS = mf.make_layout([("w", (VERSION_BYTES // 4,))], "float32")
PROBE = mf.Probe(sequences=((1, 2),), logprobs=((-0.5,),), tolerance=0.1, mean_tolerance=0.1)


_boots = itertools.count(1)


class Relay:
    """A plane, and slots that are granted in turn."""

    def __init__(self, world: World, name: str) -> None:
        self.process = SimProcess(world, name, "relay", "node-0", world._make_model)
        self.process.alive, self.process.boot_id = True, f"{name}/{next(_boots)}"
        self.reports: list[Report] = []
        self.machine = SimMachine(self.process, world.bulk, world.arenas)
        self.machine.slots.create_slots(3, VERSION_BYTES)
        self.plane = SimPlane(
            self.machine, RelayIdentity("run", name, 1, b"key"), self.take, PlaneOptions()
        )
        self.address = self.plane.start("127.0.0.1")
        self.next_slot = 0

    def take(self, report: Report) -> None:
        self.reports.append(report)
        if isinstance(report, SlotWanted):
            self.plane.grant_slot(self.slot())

    def slot(self) -> int:
        self.next_slot += 1
        return (self.next_slot - 1) % 3

    @property
    def arena(self) -> SimArena:
        return self.process.world.arenas[self.machine.slots.path]

    def publish(self, version: int) -> None:
        slot = self.slot()
        view = self.arena.slot(slot)
        view[:] = version
        manifest = build_manifest(
            view, version=version, step=version, tensors=SPECS, probe=PROBE, chunk_bytes=CHUNK_BYTES
        )
        self.plane.publish_version(manifest, slot)

    def feed(self, other: Relay, order: int) -> None:
        self.plane.set_successor(order, (other.process.name, *other.address))

    def all(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]

    def received(self) -> list[int]:
        """Versions that came in whole, each proved."""
        found = []
        for report in self.reports:
            if isinstance(report, Received):
                verify_weights(self.arena.slot(report.slot), report.manifest)
                found.append(report.manifest.version)
        return found

    def die(self) -> None:
        self.process.alive = False
        self.process.world.bulk.process_ended(self.process.boot_id)


def chain(world: World, count: int) -> list[Relay]:
    relays = [Relay(world, f"relay-{index}") for index in range(count)]
    for order, (first, second) in enumerate(itertools.pairwise(relays), 1):
        first.feed(second, order)
    return relays


def run(world: World, until_s: float) -> None:
    end_ns = world.scheduler.now + seconds(until_s)
    world.scheduler.at(end_ns, lambda: None)
    while world.scheduler.now < end_ns and world.scheduler.step():
        pass


def test_a_plane_that_is_closed_while_it_stands_still_does_nothing_more() -> None:
    """A turn of it was due, with a frame that had arrived: nobody will read that."""
    world = make_world(calm(transfer_s=3.0), 1)
    first, second = chain(world, 2)
    run(world, 1)
    second.process.paused = True
    first.publish(1)
    run(world, 2)
    second.process.paused = False
    second.plane.close()
    while second.process._backlog:
        action, args = second.process._backlog.popleft()
        action(*args)
    assert second.received() == []


def test_a_plane_whose_process_has_ended_sends_nothing_in_the_next_boot() -> None:
    """What it was sending when it ended is handed over after the next boot has begun."""
    world = make_world(calm(transfer_s=4.0), 1)
    first, second = chain(world, 2)
    first.publish(1)
    run(world, 2)
    first.die()
    first.process.boot_id, first.process.alive = f"relay-0/{next(_boots)}", True
    first.arena.slot(0)[:] = 7  # the next boot has taken over the slots
    run(world, 8)
    assert second.received() == []


def test_a_line_that_is_cut_is_waited_for_and_then_given_up() -> None:
    for cut_s, kept in ((5.0, True), (15.0, False)):
        world = make_world(calm(transfer_s=4.0), 1)
        first, second = chain(world, 2)
        first.publish(1)
        run(world, 2)
        world.network.cut("relay-0", "relay-1", 1)
        run(world, cut_s)
        world.network.cut("relay-0", "relay-1", -1)
        run(world, 8)
        assert second.received() == [1]
        assert bool(second.all(NeighbourDown)) != kept
        assert {t.kind for t in second.all(Trouble)} >= ({"stalled"} if not kept else set())


def test_a_relay_that_stands_still_holds_up_its_predecessor_and_nobody_else() -> None:
    world = make_world(calm(transfer_s=1.0), 1)
    first, second, third = chain(world, 3)
    third.process.pause = None  # type: ignore[method-assign]
    third.process.paused = True
    first.publish(1)
    run(world, 3)
    assert second.received() == [1] and third.received() == []
    third.process.paused = False
    for action, args in third.process._backlog:
        action(*args)
    run(world, 3)
    assert third.received() == [1]
