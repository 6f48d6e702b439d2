"""The trainer's way to a relay that may die at any moment: a step never waits, nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from laminar.actors import weight_publisher
from laminar.actors.service_clients import RelayClient
from laminar.actors.weight_publisher import WeightPublisher
from laminar.events import events as ev
from laminar.net.calls import RpcError
from laminar.weights import messages as m
from laminar.weights.arena.arena import Arena
from laminar.weights.arena.region import ArenaError
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes
from laminar.weights.version.slot_writer import SlotWriter
from laminar.weights.version.tensors import write_tensors
from tests.actors.parts import PROBE, SHAPE, SPECS, FakeHost, until
from tests.actors.test_relay import Machine, content


async def _probe() -> mf.Probe:
    return PROBE


class Weights(torch.nn.Module):
    """A model of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(SHAPE))

    def become(self, version: int) -> None:
        with torch.no_grad():
            self.w.fill_(float(version))


class Trainer:
    def __init__(self, run_dir: Path, relay: str = "relay-0") -> None:
        self.host = FakeHost(run_dir, "trainer-0")
        self.model = Weights()
        client = RelayClient(self.host.make_client(relay))
        self.publisher = WeightPublisher(
            self.host,  # type: ignore[arg-type]
            client,
            partial(SlotWriter, self._fill),
            SPECS,
            _probe,
        )

    def _fill(self, view: Bytes, specs: tuple[mf.TensorSpec, ...]) -> None:
        write_tensors(view, specs, [("w", self.model.w)])

    async def step(self, version: int) -> None:
        self.model.become(version)
        await self.publisher.publish_or_skip(version, version, event_seq=1)

    async def slot_is_there(self) -> None:
        await until(lambda: self.publisher._slot >= 0)

    def skipped(self) -> list[tuple[int, str]]:
        return [(event.version, event.reason) for event in self.host.all(ev.PublishSkipped)]


@pytest_asyncio.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path, 0)
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def trainer(
    tmp_path: Path, relay: Machine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Trainer]:
    monkeypatch.setattr(weight_publisher, "RELAY_CHECK_S", 0.05)
    made = Trainer(tmp_path)
    await made.publisher.start()
    yield made
    made.host.end()
    await made.publisher.relay.close(0.0)
    assert not made.host.failures


async def test_every_step_is_published_when_slots_are_free(
    relay: Machine, trainer: Trainer
) -> None:
    for version in range(1, 6):
        await trainer.slot_is_there()
        await trainer.step(version)
        await relay.host.wait(ev.WeightsPublished, version)
    assert trainer.skipped() == []
    assert content(await relay.lease(5)) == (5, 5.0)


async def test_a_step_without_a_slot_is_skipped_at_once_and_published_when_asked_for(
    relay: Machine, trainer: Trainer
) -> None:
    leases = []
    for version in range(1, 4):
        await trainer.slot_is_there()
        await trainer.step(version)
        await relay.host.wait(ev.WeightsPublished, version)
        leases.append(await relay.lease(version, exact=True))
    await trainer.step(4)
    assert trainer.skipped() == [(4, "no slot was free")]
    lease = leases[0]
    assert isinstance(lease, m.VersionLeased)
    relay.relay.slots.release(m.ReleaseLease(arena=lease.arena, lease_id=lease.lease_id))
    assert await trainer.publisher.publish_owed(4, 4)
    await relay.host.wait(ev.WeightsPublished, 4)
    assert content(await relay.lease(4)) == (4, 4.0)


async def test_steps_go_on_while_the_relay_is_away_and_the_owed_version_follows(
    relay: Machine, trainer: Trainer, tmp_path: Path
) -> None:
    await trainer.slot_is_there()
    await trainer.step(1)
    await relay.host.wait(ev.WeightsPublished)
    await trainer.slot_is_there()
    await relay.kill()
    await trainer.step(2)  # into the arena of the dead relay, as nobody knows yet
    await trainer.step(3)
    assert trainer.skipped() == [(3, "no slot was free")]
    again = Machine(tmp_path, 0, incarnation=2)
    await again.start()
    await trainer.host.wait(ev.PublishSkipped, 2)
    assert trainer.skipped()[1] == (2, "the relay was restarted")
    assert await trainer.publisher.publish_owed(3, 3)
    assert (await again.host.wait(ev.WeightsPublished)).version == 3
    assert content(await again.lease(0)) == (3, 3.0)
    await again.stop()


async def test_an_owed_publish_survives_the_death_of_the_relay_in_the_middle(
    relay: Machine, trainer: Trainer, tmp_path: Path
) -> None:
    await trainer.slot_is_there()
    await relay.kill()
    again = Machine(tmp_path, 0, incarnation=2)
    trainer.host.spawn(_start(again))
    trainer.model.become(7)
    assert await trainer.publisher.publish_owed(7, 7)
    await again.host.wait(ev.WeightsPublished)
    assert content(await again.lease(7, exact=True)) == (7, 7.0)
    assert trainer.skipped() == []  # it was published under its command
    await again.stop()


async def _start(machine: Machine) -> None:
    await machine.start()


async def test_an_owed_publish_gives_up_in_time(
    relay: Machine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_publisher, "SLOT_WAIT_S", 0.3)
    await trainer.slot_is_there()
    await trainer.step(1)
    await relay.kill()
    assert not await trainer.publisher.publish_owed(2, 2)


async def test_a_relay_that_does_not_answer_yet_is_waited_for(
    relay: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not ready before a coordinator has said so, which may be away for long."""
    trainer = Trainer(tmp_path)
    ask, asked = trainer.publisher.relay.send_request, 0

    async def ask_in_time(*request: object) -> object:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise TimeoutError("relay-0 did not answer request 1 in time")
        return await ask(*request)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.publisher.relay, "send_request", ask_in_time)
    await trainer.publisher.start()
    await trainer.slot_is_there()
    trainer.host.end()
    await trainer.publisher.close()


async def test_slots_that_cannot_be_had_end_the_start_with_the_relays_sentence(
    tmp_path: Path,
) -> None:
    relay = Machine(tmp_path, 1, "weights.max_bytes=100")
    await relay.start()
    trainer = Trainer(tmp_path, "relay-1")
    with pytest.raises(RpcError, match=r"raise weights\.max_bytes"):
        await trainer.publisher.start()
    await trainer.publisher.close()
    await relay.stop()


async def test_a_trainer_that_ends_waits_for_no_memory(
    relay: Machine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread stops at the next piece of the slot that it fills."""
    filling, ended = threading.Event(), threading.Event()
    prepare = Arena.populate_slot

    def endless(arena: Arena, index: int) -> None:
        try:
            while True:
                arena._filled[index] = 0
                prepare(arena, index)
                filling.set()
        except ArenaError as error:
            assert "is closed" in str(error)
            ended.set()
            raise

    await trainer.slot_is_there()
    monkeypatch.setattr(Arena, "populate_slot", endless)
    assert await asyncio.to_thread(filling.wait, 20)
    await trainer.publisher.close()
    assert await asyncio.to_thread(ended.wait, 20)
