"""Relay actors with real sockets and shared memory, and their orders given by hand."""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from laminar.actors.relay import Relay
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.net.calls import RpcError
from laminar.weights import messages as m
from laminar.weights.arena.arena import Arena, arena_path
from laminar.weights.chain.transfer_thread import Plane
from laminar.weights.machine import RelayMachine
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import verify_weights
from tests.actors.parts import VERSION_BYTES, FakeHost, Writer, commit, order, until
from tools.kit.secrets import SECRET

NOBODY = cmd.ForwardWeights(to="relay-0", successor="", address="", incarnation=0)


class Machine:
    """One relay and, on demand, its trainer or reader."""

    def __init__(self, run_dir: Path, index: int, *settings: str, incarnation: int = 1) -> None:
        self.run_dir, self.index, self.settings = run_dir, index, settings
        node = f"node-{index}"
        self.host = FakeHost(
            run_dir, f"relay-{index}", *settings, node=node, incarnation=incarnation
        )
        self.machine = RelayMachine(run_dir.name, SECRET.run_id, node, self.host.boot_id)
        self.relay = Relay(self.host, self.machine)  # type: ignore[arg-type]
        self._writers: list[Writer] = []
        self.killed = False

    async def start(self) -> None:
        await self.relay.start()
        self.ready = self.host.all(ev.RelayReady)[-1]

    def order(self, command_id: int, command: cmd.Command) -> None:
        self.relay.handle_orders(order(command_id, command))

    def feed(self, other: Machine, command_id: int, incarnation: int | None = None) -> None:
        successor = other.host.incarnation if incarnation is None else incarnation
        command = cmd.ForwardWeights(
            to=self.host.name,
            successor=other.host.name,
            address=other.ready.chain_address,
            incarnation=successor,
        )
        self.order(command_id, command)

    def client(self, name: str) -> Writer:
        """A process of this machine that talks to the relay."""
        host = FakeHost(self.run_dir, name, *self.settings, node=self.host.node)
        self._writers.append(Writer(host, self.host.name))
        return self._writers[-1]

    async def trainer(self) -> Writer:
        writer = self.client("trainer-0")
        await writer.open()
        return writer

    async def lease(
        self, version: int, exact: bool = False
    ) -> m.VersionLeased | m.VersionUnavailable:
        reader = self.client("rollout-0")
        await reader.relay.start()
        request = m.LeaseVersion(version=version, exact=exact)
        return await reader.relay.send_request(request, m.VersionLeased, m.VersionUnavailable)

    @property
    def plane(self) -> Plane:
        assert self.machine._plane is not None
        return self.machine._plane

    async def kill(self) -> None:
        """As kill -9, as far as one process can play it: nothing is cleaned up."""
        self.killed = True
        await self.relay.server.close()
        self.plane.close()
        self.host.end()
        if self.machine.slots.slot_bytes:  # the kernel gives back what a process locked
            fcntl.flock(self.machine.slots.get_region(0).fd, fcntl.LOCK_UN)

    async def stop(self) -> None:
        for writer in self._writers:
            await writer.relay.close(0.0)
        if self.killed:
            self.machine.slots.close()  # what its machine's next relay would do
        else:
            await self.relay.stop()
        assert not self.host.failures


Make = Callable[..., Awaitable[Machine]]


@pytest_asyncio.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Machine] = []

    async def make(index: int, *settings: str, incarnation: int = 1) -> Machine:
        made.append(Machine(tmp_path, index, *settings, incarnation=incarnation))
        await made[-1].start()
        return made[-1]

    yield make
    for each in reversed(made):
        await each.stop()
    paths = [
        arena_path(tmp_path.name, SECRET.run_id, each.host.node, each.host.boot_id) for each in made
    ]
    assert not any(path.exists() for path in paths)


def content(lease: m.VersionLeased | m.VersionUnavailable) -> tuple[int, float]:
    """Version, and the value that all its weights have; proved by its digest."""
    assert isinstance(lease, m.VersionLeased), lease
    manifest = mf.decode(lease.manifest)
    view = Arena.attach(Path(lease.arena)).get_slot(lease.slot)
    verify_weights(view, manifest)
    values = np.frombuffer(view[:VERSION_BYTES], "<f4")
    assert (values == values[0]).all()
    return manifest.version, float(values[0])


async def test_a_version_goes_down_the_chain_and_can_be_leased_everywhere(machine: Make) -> None:
    machines = [await machine(index) for index in range(3)]
    for number, (first, second) in enumerate(itertools.pairwise(machines), 1):
        first.feed(second, number)
        linked = await first.host.wait(ev.RelayLinked)
        assert linked == ev.RelayLinked(command_id=number, successor=second.host.name)
    trainer = await machines[0].trainer()
    for version in (0, 3):
        await trainer.publish(version)
        for each in machines[1:]:
            await until(lambda m=each, v=version: v in m.relay.slots.held)
    published = machines[0].host.all(ev.WeightsPublished)
    for each in machines[1:]:
        received = each.host.all(ev.WeightsReceived)
        assert [(r.version, r.step, r.digest) for r in received] == [
            (p.version, p.step, p.digest) for p in published
        ]
        assert received[-1].held == (0, 3)
        assert content(await each.lease(0)) == (3, 3.0)
        assert content(await each.lease(0, exact=True)) == (0, 0.0)  # any version that is kept
        assert await each.lease(1, exact=True) == m.VersionUnavailable(held=(0, 3))


async def test_an_order_for_nobody_is_answered_at_once_and_a_late_one_changes_nothing(
    machine: Make,
) -> None:
    first, second = await machine(0), await machine(1)
    first.order(7, NOBODY)
    first.feed(second, 3)
    first.order(3, NOBODY)
    first.feed(second, 9)
    await first.host.wait(ev.RelayLinked, 2)
    linked = [(e.command_id, e.successor) for e in first.host.all(ev.RelayLinked)]
    assert linked == [(7, ""), (9, "relay-1")]


async def test_another_process_at_the_address_is_no_link(machine: Make) -> None:
    first, second = await machine(0), await machine(1, incarnation=4)
    first.feed(second, 1, incarnation=3)
    trouble = await first.host.wait(ev.TransferProblem)
    assert trouble.kind == "other-relay"
    assert trouble.detail == "incarnation 4 is there, not 3"
    assert not first.host.all(ev.RelayLinked)


async def test_an_unreachable_successor_is_reported_and_tried_until_it_is_there(
    machine: Make, tmp_path: Path
) -> None:
    first, second = await machine(0), await machine(1)
    await second.kill()
    first.feed(second, 1)
    trouble = await first.host.wait(ev.TransferProblem)
    assert (trouble.kind, trouble.relay) == ("unreachable", "relay-1")
    _, _, port = second.ready.chain_address.rpartition(":")
    late = Machine(tmp_path, 1)
    late.relay.plane = late.relay._make_plane()
    late.relay.plane.start("127.0.0.1", int(port))
    await first.host.wait(ev.RelayLinked)
    late.plane.close()


async def test_what_was_granted_by_a_killed_relay_is_void(machine: Make) -> None:
    first = await machine(0)
    trainer = await first.trainer()
    await trainer.publish(1)
    slot = await trainer.grant()
    reader = first.client("rollout-0")
    await reader.relay.start()
    wanted = m.LeaseVersion(version=1, exact=True)
    lease = await reader.relay.send_request(wanted, m.VersionLeased)
    await first.kill()
    assert Path(trainer.arena).exists()
    await machine(0)
    assert not Path(trainer.arena).exists()
    late = await trainer.relay.send_request(
        commit(trainer.arena, slot, 2), m.SlotCommitted, m.ArenaReplaced
    )
    assert isinstance(late, m.ArenaReplaced)
    released = await reader.relay.send_request(
        m.ReleaseLease(arena=lease.arena, lease_id=lease.lease_id), m.LeaseReleased, m.ArenaReplaced
    )
    assert isinstance(released, m.ArenaReplaced)
    assert await reader.relay.send_request(
        wanted, m.VersionLeased, m.VersionUnavailable
    ) == m.VersionUnavailable(held=())


async def test_a_version_that_is_committed_again_is_announced_again(machine: Make) -> None:
    first = await machine(0)
    trainer = await first.trainer()
    await trainer.publish(4)
    await trainer.publish(4)  # the coordinator did not hear of the first
    await first.host.wait(ev.WeightsPublished, 2)
    first_time, again = first.host.all(ev.WeightsPublished)
    assert first_time == again
    await trainer.publish(5)
    await first.host.wait(ev.WeightsPublished, 3)


async def test_a_relay_without_room_says_so_and_stays_in_the_chain(machine: Make) -> None:
    first, second = await machine(0), await machine(1, f"weights.max_bytes={VERSION_BYTES}")
    third = await machine(2)
    first.feed(second, 1)
    await (await first.trainer()).publish(1)
    trouble = await second.host.wait(ev.TransferProblem)
    assert trouble.kind == "denied"
    assert "raise weights.max_bytes" in trouble.detail
    first.feed(third, 2)  # a chain without it goes on
    assert (await third.host.wait(ev.WeightsReceived)).version == 1


async def test_an_arena_larger_than_shared_memory_ends_the_run_at_once(machine: Make) -> None:
    relay = await machine(0, f"weights.max_bytes={1 << 62}")
    writer = relay.client("trainer-0")
    await writer.relay.start()
    with pytest.raises(RpcError, match="needs"):
        await writer.relay.send_request(m.OpenArena(version_bytes=1 << 50), m.ArenaOpened)
    assert "give it more room" in relay.host.failures.pop()
    assert relay.host.exit_code == exit_codes.USER_ERROR


async def test_a_pin_keeps_a_version_on_a_relay_that_has_it_only_later(machine: Make) -> None:
    first, second = await machine(0), await machine(1)
    second.order(1, cmd.PinVersion(to="relay-1", version=2))
    first.feed(second, 1)
    trainer = await first.trainer()
    for version in range(1, 6):
        await trainer.publish(version)
        await until(lambda v=version: v in second.relay.slots.held)
    assert second.relay.slots.held == (2, 4, 5)
    second.order(2, cmd.PinVersion(to="relay-1", version=-1))
    for version in (6, 7):
        await trainer.publish(version)
        await until(lambda v=version: v in second.relay.slots.held)
    assert 2 not in second.relay.slots.held


async def test_a_reader_holds_up_its_relay_and_nobody_else(machine: Make) -> None:
    """Its lease takes a slot, so versions are skipped there; the relay before it goes on."""
    first, second = await machine(0), await machine(1)
    first.feed(second, 1)
    trainer = await first.trainer()
    leases = []
    for version in range(1, 4):
        await trainer.publish(version)
        await until(lambda v=version: v in second.relay.slots.held)
        leases.append(await second.lease(version, exact=True))
    for version in (4, 5):
        await trainer.publish(version)
        await first.host.wait(ev.WeightsPublished, version)
    assert second.relay.slots.held == (1, 2, 3)
    lease = leases[0]
    assert isinstance(lease, m.VersionLeased)
    reader = second.client("rollout-0")
    await reader.relay.start()
    release = m.ReleaseLease(arena=lease.arena, lease_id=lease.lease_id)
    assert (await reader.relay.send_request(release, m.LeaseReleased)).valid
    await until(lambda: 5 in second.relay.slots.held)


async def test_a_fault_of_the_moving_thread_ends_the_process(machine: Make) -> None:
    first = await machine(0)
    first.plane._post_order(lambda: 1 / 0)
    await until(lambda: bool(first.host.failures))
    assert "ZeroDivisionError" in first.host.failures.pop()
    assert first.machine.slots.kept  # for its next process
