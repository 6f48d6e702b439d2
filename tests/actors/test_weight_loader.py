"""A replica's way to its relay: what is proved is served, whatever becomes of the relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from laminar.actors import weight_loader
from laminar.actors.relay_slots import CHAIN
from laminar.actors.service_clients import RelayClient
from laminar.actors.system.weight_files import ReplicaFiles
from laminar.actors.weight_loader import WeightLoader
from laminar.engines.protocol import KvOnUpdate, WeightSource
from laminar.engines.weight_file import MappedWeights
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.run.directory import VERSION_FILE
from laminar.weights import messages as m
from laminar.weights.arena.arena import Arena
from laminar.weights.version import checkpoint
from laminar.weights.version import manifest as mf
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.hashes import build_manifest
from laminar.weights.version.tensors import write_tensors
from tests.actors.parts import PROBE, SPECS, FakeHost, Writer, tensor, until
from tests.actors.test_relay import Machine
from tools.kit.one_process import build_tensor_manifest


class FakeEngine:
    """Copies the one tensor; scores the probe as the trainer did."""

    def __init__(self) -> None:
        self.value = -1.0
        self.loads = 0
        self.on_update: KvOnUpdate | None = None
        self.during: Callable[[], None] = lambda: None
        self.between: Any = None  #: awaited after a load
        self.arrivals: list[int] = []  #: bytes of a stream, as it was told
        self.told = ""  #: the last call of a stream

    async def load(self, source: WeightSource, on_update: KvOnUpdate | None = None) -> None:
        self.loads += 1
        self.on_update = on_update
        for _, found in MappedWeights().iter_tensors(source):
            self.value = float(torch.clone(found)[0, 0])
        self.during()
        if self.between is not None:
            await self.between()

    def expect_weights(self) -> asyncio.Future[None]:
        return self._say("expect")

    def load_partial(self, source: WeightSource, num_bytes: int) -> asyncio.Future[None]:
        self.arrivals.append(num_bytes)
        self.value = float([t for _, t in MappedWeights().iter_tensors(source)][-1][-1, -1])
        return self._say("arrived")

    def resume_sampling(self) -> asyncio.Future[None]:
        return self._say("go on")

    def _say(self, what: str) -> asyncio.Future[None]:
        self.told = what
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        said.set_result(None)
        return said

    async def compute_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [list(row) for row in PROBE.logprobs]


async def wrong_score(sequences: list[list[int]]) -> list[list[float]]:
    return [[-9.0]]


class Replica:
    def __init__(self, run_dir: Path) -> None:
        self.host = FakeHost(run_dir, "rollout-0")
        self.engine = FakeEngine()
        self.relay = RelayClient(self.host.make_client("relay-0"))
        files = ReplicaFiles(checkpoint.read_version)
        self.loader = WeightLoader(self.host, self.relay, self.engine, files)  # type: ignore[arg-type]

    async def pull(
        self,
        version: int = 0,
        exact: bool = False,
        checkpoint: str = "",
        purpose: str = "newer",
        order: int = 1,
        **holder: str,
    ) -> ev.Event:
        """What it says in the end."""
        command = cmd.PullWeights(
            to="rollout-0",
            version=version,
            exact=exact,
            purpose=purpose,
            checkpoint=checkpoint,
            **holder,
        )
        before = len(self.host.events)
        await self.loader.pull_weights(
            cmd.Envelope(command_id=order, cause=1, command=command), command
        )
        (said,) = self.host.events[before:]
        return said


@pytest_asyncio.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path, 0)
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def trainer(relay: Machine) -> Writer:
    return await relay.trainer()


@pytest_asyncio.fixture
async def replica(tmp_path: Path, relay: Machine) -> AsyncIterator[Replica]:
    made = Replica(tmp_path)
    await made.relay.start()
    yield made
    await made.relay.close(0.0)


async def publish(relay: Machine, trainer: Writer, *versions: int) -> None:
    for version in versions:
        await trainer.publish(version)
        await until(lambda v=version: v in relay.relay.slots.held)


async def test_any_kept_version_can_be_pulled_at_any_time(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    await publish(relay, trainer, 1, 2, 3)
    for wanted, exact, found in ((2, True, 2), (1, True, 1), (2, False, 3), (1, True, 1)):
        loaded = await replica.pull(wanted, exact)
        assert isinstance(loaded, ev.WeightsLoaded)
        assert (loaded.version, replica.engine.value) == (found, float(found))
    gone = await replica.pull(7)
    assert gone == ev.VersionMissing(version=7, held=(1, 2, 3))


async def test_an_older_version_is_fetched_from_another_machine(
    tmp_path: Path, relay: Machine, trainer: Writer, replica: Replica
) -> None:
    """The own relay came late and has the newest version only; the other has both."""
    other = Machine(tmp_path, 1)
    await other.start()
    elsewhere = await other.trainer()
    await publish(other, elsewhere, 1, 3)
    await publish(relay, trainer, 3)
    holder = {"holder": other.host.name, "address": other.ready.chain_address}
    loaded = await replica.pull(1, True, order=1, **holder)
    assert isinstance(loaded, ev.WeightsLoaded), loaded
    assert (loaded.version, replica.engine.value) == (1, 1.0)
    received = await relay.host.wait(ev.WeightsReceived)
    assert (received.version, received.held) == (1, (1, 3))
    gone = await replica.pull(2, True, order=2, **holder)
    assert gone == ev.VersionMissing(version=2, held=(1, 3))
    trouble = relay.host.all(ev.TransferProblem)[-1]
    assert (trouble.kind, trouble.relay, trouble.version) == ("not-fetched", "relay-1", 2)
    await publish(relay, trainer, 4)  # a fetched version is in nobody's way
    await other.stop()


def write_checkpoint(run_dir: Path, version: int, path: str = "checkpoints/step_1") -> Path:
    directory = run_dir / path
    directory.mkdir(parents=True)
    weights = {"w": tensor(version)}
    manifest = build_tensor_manifest(
        version=version, step=version, specs=SPECS, tensors=weights.items(), probe=PROBE
    )
    save_file(weights, directory / checkpoint.MODEL_FILE)
    (directory / VERSION_FILE).write_bytes(mf.encode(manifest))
    return directory


async def test_a_version_that_no_relay_holds_is_loaded_from_its_checkpoint(
    relay: Machine, trainer: Writer, replica: Replica, tmp_path: Path
) -> None:
    """With the weights and the digest that it was published with; also without any relay."""
    await publish(relay, trainer, 1, 2)
    first = await replica.pull(1, exact=True)
    write_checkpoint(tmp_path, 1)
    await replica.pull(2)
    await relay.kill()
    again = await replica.pull(1, exact=True, checkpoint="checkpoints/step_1")
    assert isinstance(first, ev.WeightsLoaded) and isinstance(again, ev.WeightsLoaded)
    assert (again.version, again.digest, again.reloaded) == (1, first.digest, True)
    assert replica.engine.value == 1.0


async def test_a_damaged_checkpoint_never_reaches_the_engine(
    replica: Replica, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, 1)
    save_file({"w": tensor(3)}, directory / checkpoint.MODEL_FILE)
    refused = await replica.pull(1, exact=True, checkpoint="checkpoints/step_1")
    assert isinstance(refused, ev.CheckpointRefused) and "xxh3_64" in refused.reason
    assert replica.engine.loads == 0


async def test_a_checkpoint_whose_probe_differs_is_rejected(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right bytes in the wrong place: then it is this replica's fault."""
    write_checkpoint(tmp_path, 1)
    monkeypatch.setattr(replica.engine, "compute_logprobs", wrong_score)
    rejected = await replica.pull(1, exact=True, checkpoint="checkpoints/step_1")
    assert isinstance(rejected, ev.WeightsRejected) and replica.loader.digest == ""


class Arrival:
    """A version that comes to a relay chunk by chunk, without a predecessor; of the one tensor, or
    of `tensors` in this order."""

    def __init__(
        self,
        relay: Machine,
        version: int = 1,
        tensors: Sequence[tuple[str, torch.Tensor]] = (),
        probe: mf.Probe = PROBE,
        chunk_bytes: int = 64,
    ) -> None:
        tensors = tensors or [("w", tensor(version))]
        specs = mf.make_layout([(name, each.shape) for name, each in tensors], "float32")
        content = np.zeros(mf.check_tensors(specs), np.uint8)
        write_tensors(content, specs, tensors)
        self.slots, self.table = relay.relay.slots, relay.machine.versions
        self.slots.ensure_slots(len(content))
        slot = self.slots.grant_to(CHAIN)
        self.content = content.tobytes()
        self.manifest = build_manifest(
            content,
            version=version,
            step=version,
            tensors=specs,
            probe=probe,
            chunk_bytes=chunk_bytes,
        )
        region = relay.machine.slots.get_region(slot)
        self.copy = VersionCopy(self.manifest, slot, region)
        self.table.put(self.copy)

    def come(self, *chunks: int) -> None:
        for index in chunks:
            begin, end = self.copy.bounds[index : index + 2]
            self.copy.get_chunk(index).view[:] = self.content[begin:end]
            assert self.copy.accept_chunk(index)

    def end(self) -> None:
        self.copy.complete = True
        assert self.slots.commit_version(CHAIN, self.copy.slot, self.manifest)

    def give_up(self) -> None:
        self.table.remove(self.copy.version)
        self.slots.abandon_slot(CHAIN)


def streamed(replica: Replica, version: int = 1) -> asyncio.Task[ev.Event]:
    replica.loader.expect_version(version)
    return asyncio.create_task(replica.pull(version, True, purpose="stream"))


async def test_a_stream_copies_what_is_proved_and_serves_when_the_whole_is(
    relay: Machine, replica: Replica
) -> None:
    pulling, engine = streamed(replica), replica.engine
    assert (replica.loader.coming, engine.told) == (1, "expect")
    arrival = Arrival(relay)
    arrival.come(0, 2)  # the third chunk is no use before the second
    await until(lambda: engine.arrivals == [64])
    arrival.come(1)
    await until(lambda: engine.arrivals == [64, 192])
    arrival.come(3)
    await until(lambda: engine.arrivals == [64, 192, 256])
    assert replica.loader.version == -1 and not pulling.done()
    arrival.end()
    loaded = await pulling
    assert isinstance(loaded, ev.WeightsLoaded) and loaded.reloaded
    assert (loaded.version, loaded.digest) == (1, arrival.manifest.digest)
    assert (engine.told, engine.value, engine.loads) == ("go on", 1.0, 0)
    assert (replica.loader.version, replica.loader.coming) == (1, -1)


@pytest.mark.parametrize("again", [False, True])
async def test_a_copy_whose_slot_was_given_away_is_not_served(
    relay: Machine, replica: Replica, again: bool
) -> None:
    """Also if the same version comes a second time, into the same slot."""
    arrival = Arrival(relay)
    arrival.come(0, 1)
    pulling = streamed(replica)
    await until(lambda: replica.engine.arrivals == [128])
    arrival.give_up()
    newer = Arrival(relay, 1 if again else 2)
    newer.come(0, 1, 2, 3)
    newer.end()
    assert newer.copy.slot == arrival.copy.slot
    gone = await pulling
    assert isinstance(gone, ev.VersionMissing) and gone.version == 1
    assert replica.engine.told != "go on"
    assert (replica.loader.version, replica.loader.coming) == (-1, -1)


async def test_a_relay_that_was_started_again_goes_on_with_no_copy_of_the_former(
    tmp_path: Path, relay: Machine, replica: Replica
) -> None:
    """Its copies have the same numbers."""
    arrival = Arrival(relay)
    arrival.come(0, 1)
    pulling = streamed(replica)
    await until(lambda: replica.engine.arrivals == [128])
    await relay.kill()
    again = Machine(tmp_path, 0, incarnation=2)
    await again.start()
    other = Arrival(again)
    other.copy.number = arrival.copy.number
    other.come(0, 1, 2, 3)
    other.end()
    assert isinstance(await pulling, ev.VersionMissing)
    assert replica.engine.told != "go on" and replica.loader.version == -1
    await again.stop()


@pytest.mark.parametrize("wrong", ["digest", "probe"])
async def test_a_stream_that_proves_wrong_is_never_sampled(
    relay: Machine, replica: Replica, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    if wrong == "probe":
        monkeypatch.setattr(replica.engine, "compute_logprobs", wrong_score)
    arrival = Arrival(relay)
    arrival.come(0, 1)
    pulling = streamed(replica)
    await until(lambda: replica.engine.arrivals == [128])
    arrival.come(2, 3)
    if wrong == "digest":
        arrival.copy.get_chunk(3).view[:] = bytes(64)
    arrival.end()
    assert isinstance(await pulling, ev.WeightsRejected)
    assert replica.engine.told != "go on" and replica.loader.version == -1


async def test_equal_weights_are_not_loaded_again(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    await publish(relay, trainer, 1)
    await replica.pull()
    loaded = await replica.pull()
    assert isinstance(loaded, ev.WeightsLoaded)
    assert (loaded.reloaded, replica.engine.loads) == (False, 1)


async def test_the_relay_dies_while_the_slot_is_read_and_the_load_counts(
    relay: Machine, trainer: Writer, replica: Replica, tmp_path: Path
) -> None:
    await publish(relay, trainer, 1)
    again = Machine(tmp_path, 0, incarnation=2)

    async def another() -> None:
        await relay.kill()
        await again.start()

    replica.engine.between = another
    loaded = await replica.pull()
    assert isinstance(loaded, ev.WeightsLoaded)
    assert (loaded.version, replica.engine.loads) == (1, 1)
    replica.engine.between = None
    assert await replica.pull(1) == ev.VersionMissing(version=1, held=())
    await publish(again, await again.trainer(), 2)
    loaded = await replica.pull(2)  # out of the other arena
    assert isinstance(loaded, ev.WeightsLoaded)
    assert (loaded.version, replica.engine.value) == (2, 2.0)
    await again.stop()


async def test_a_relay_that_is_gone_does_not_keep_a_loaded_replica_from_serving(
    relay: Machine, trainer: Writer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_loader, "RELEASE_S", 0.1)
    await publish(relay, trainer, 1)
    replica.engine.between = relay.kill
    loaded = await replica.pull()
    assert isinstance(loaded, ev.WeightsLoaded)


async def test_a_relay_that_does_not_answer_holds_nothing(
    relay: Machine, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await relay.kill()

    async def ask(*asked: object, **options: object) -> m.VersionLeased:
        raise TimeoutError("the relay-0 did not answer")

    monkeypatch.setattr(replica.relay, "send_request", ask)
    assert await replica.pull(3) == ev.VersionMissing(version=3, held=())


async def test_an_arena_that_went_with_its_relay_is_asked_for_again_later(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    await publish(relay, trainer, 1)
    Path(trainer.arena).unlink()
    assert await replica.pull(1) == ev.VersionMissing(version=1, held=())


async def test_bytes_that_changed_under_the_reader_are_loaded_again(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    await publish(relay, trainer, 1)
    lease = await relay.lease(1)
    assert isinstance(lease, m.VersionLeased)
    view = Arena.attach(Path(lease.arena)).get_slot(lease.slot)
    right = view.copy()

    def spoil_once() -> None:
        view[:] = 7 if replica.engine.loads == 1 else right

    replica.engine.during = spoil_once
    loaded = await replica.pull()
    assert isinstance(loaded, ev.WeightsLoaded)
    assert replica.engine.loads == 2


async def test_a_load_that_fails_twice_is_rejected(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    await publish(relay, trainer, 1)
    replica.engine.compute_logprobs = wrong_score  # type: ignore[method-assign]
    rejected = await replica.pull()
    assert isinstance(rejected, ev.WeightsRejected)
    assert "differ from the trainer's by 8.5" in rejected.reason


async def test_a_version_that_goes_after_a_failed_load_leaves_nothing_to_serve(
    relay: Machine, trainer: Writer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has lost what it had: the coordinator must not believe that it has it still."""
    await publish(relay, trainer, 1, 2)
    assert isinstance(await replica.pull(1, exact=True), ev.WeightsLoaded)
    ask = replica.relay.send_request

    async def evicted_after_the_load(request: Any, *answers: Any, **options: Any) -> Any:
        if replica.engine.loads == 2 and isinstance(request, m.LeaseVersion):
            return m.VersionUnavailable(held=(3,))
        return await ask(request, *answers, **options)

    monkeypatch.setattr(replica.relay, "send_request", evicted_after_the_load)
    monkeypatch.setattr(replica.engine, "compute_logprobs", wrong_score)
    said = await replica.pull(2, exact=True)
    assert isinstance(said, ev.WeightsRejected) and said.version == 2
    assert (replica.loader.version, replica.loader.digest) == (-1, "")


async def test_a_load_in_flight_is_told_what_becomes_of_the_cache_and_proves_itself_last(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    await publish(relay, trainer, 1, 2)
    await replica.pull(1, exact=True)
    assert (replica.engine.on_update, replica.loader.proved) == (None, 1)
    during = []

    def note() -> None:
        loader = replica.loader
        during.append((loader.version, loader.proved, loader.get_weights(1), loader.get_weights(2)))

    replica.engine.during = note
    assert isinstance(await replica.pull(2, True, purpose="in-flight"), ev.WeightsLoaded)
    ((version, proved, before, after),) = during
    assert (version, proved, before.version, after.version) == (1, 1, 1, 2)
    assert replica.engine.on_update == "keep"
    assert (replica.loader.version, replica.loader.proved) == (2, 2)


async def test_a_load_in_flight_that_proves_wrong_is_not_tried_again(
    relay: Machine, trainer: Writer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went on with it is lost already: whoever has it next must hear of that at once."""
    await publish(relay, trainer, 1, 2)
    await replica.pull(1, exact=True)
    monkeypatch.setattr(replica.engine, "compute_logprobs", wrong_score)
    said = await replica.pull(2, True, purpose="in-flight")
    assert isinstance(said, ev.WeightsRejected)
    assert (replica.engine.loads, replica.loader.version, replica.loader.proved) == (2, -1, 1)


async def test_what_is_served_changes_with_a_load_only(
    relay: Machine, trainer: Writer, replica: Replica
) -> None:
    """Not with an order to pull that comes to nothing."""
    assert replica.loader.version == -1
    await publish(relay, trainer, 1)
    await replica.pull(1)
    assert await replica.pull(7) == ev.VersionMissing(version=7, held=(1,))
    assert replica.loader.version == 1
