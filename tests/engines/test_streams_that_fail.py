"""A relay, a replica's loader and the torch engine: whatever a stream fails of, nothing was sampled
by it, and one more load serves.

A file of its own: beside it the engine is tried without a relay, and the loader elsewhere without
an engine.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.actors.service_clients import RelayClient
from laminar.actors.system.weight_files import ReplicaFiles
from laminar.actors.weight_loader import WeightLoader
from laminar.engines.protocol import TokenDelta
from laminar.engines.runner import EngineRunner
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.weights.version import checkpoint
from laminar.weights.version import manifest as mf
from tests.actors.parts import FakeHost, until
from tests.actors.test_relay import Machine
from tests.actors.test_weight_loader import Arrival
from tests.engines.engine_models import build
from tests.engines.torch.test_torch_engine_streaming import (
    REQUESTS,
    blank,
    in_order,
    outputs_of,
    whole,
)

TIMES = 100
CHUNK_BYTES = 4_096


class Replica:
    """A loader with the engine and its thread, and what that gave."""

    def __init__(self, run_dir: Path, model: Any) -> None:
        self.host = FakeHost(run_dir, "rollout-0")
        self.deltas: list[TokenDelta] = []
        self.engine = EngineRunner(blank(model), self.deltas.extend, asyncio.get_running_loop())
        self.relay = RelayClient(self.host.make_client("relay-0"))
        files = ReplicaFiles(checkpoint.read_version)
        self.loader = WeightLoader(self.host, self.relay, self.engine, files)  # type: ignore[arg-type]

    async def pull(self, purpose: str) -> ev.Event:
        """What it says in the end."""
        command = cmd.PullWeights(to="rollout-0", version=1, exact=True, purpose=purpose)
        before = len(self.host.events)
        await self.loader.pull_weights(
            cmd.Envelope(command_id=1, cause=1, command=command), command
        )
        return self.host.events[before]

    async def add(self) -> None:
        for item in REQUESTS:
            await self.engine.add(item)

    async def give_up_work(self) -> None:
        """As a rollout does when a load begins."""
        for item in REQUESTS:
            await self.engine.abort_request(item.request_id)


def probe_of(model: Any, wrong: bool) -> mf.Probe:
    ids = (1, 5, 9, 30)
    logits = model(torch.tensor([ids])).logits[0, :-1].detach()
    scores = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    logprobs = tuple((scores - float(wrong)).tolist())
    return mf.Probe(sequences=(ids,), logprobs=(logprobs,), tolerance=1e-3, mean_tolerance=1e-4)


async def fail(
    relay: Machine, replica: Replica, model: Any, fault: str, drawn: random.Random
) -> asyncio.Task[ev.Event]:
    """One stream, with work that waits for it, that comes to nothing; what it says of that."""
    replica.loader.expect_version(1)
    await replica.add()
    pulling = asyncio.create_task(replica.pull("stream"))
    probe = probe_of(model, wrong=fault == "probe")
    arrival = Arrival(relay, 1, in_order(model), probe, CHUNK_BYTES)
    chunks, last = list(range(arrival.copy.num_chunks)), arrival.copy.num_chunks - 1
    half = drawn.randrange(4, last)  # the embedding has four
    arrival.come(*chunks[:half])
    await until(lambda: replica.engine._given > 0)
    if fault == "relay":
        await relay.kill()
        return pulling
    arrival.come(*chunks[half:])
    if fault == "last-chunk":
        view = arrival.copy.get_chunk(last).view
        place = drawn.randrange(len(view))
        view[place] ^= 1 << drawn.randrange(8)
    arrival.end()
    await pulling
    return pulling


@pytest.mark.long
@pytest.mark.parametrize("fault", ["last-chunk", "probe", "relay"])
async def test_nothing_was_sampled_and_the_next_load_serves(fault: str, tmp_path: Path) -> None:
    model = build("qwen2")
    expected = {name: output.tokens for name, output in whole(model)[1].items()}
    for seed in range(TIMES):
        run_dir = tmp_path / f"{seed}"
        run_dir.mkdir()
        relay = Machine(run_dir, 0)
        await relay.start()
        replica = Replica(run_dir, model)
        await replica.relay.start()
        pulling = await fail(relay, replica, model, fault, random.Random(seed))
        await relay.stop()
        again = Machine(run_dir, 0, incarnation=2)
        await again.start()
        arrival = Arrival(again, 1, in_order(model), probe_of(model, False), CHUNK_BYTES)
        arrival.come(*range(arrival.copy.num_chunks))
        arrival.end()
        assert isinstance(
            await pulling, ev.VersionMissing if fault == "relay" else ev.WeightsRejected
        )
        assert not replica.deltas and not replica.engine.drain_steps(), seed
        assert replica.loader.version == -1
        await replica.give_up_work()
        loaded = await replica.pull("start")
        assert isinstance(loaded, ev.WeightsLoaded), (seed, loaded)
        await replica.add()
        assert {n: o.tokens for n, o in (await outputs_of(replica.deltas)).items()} == expected
        await again.stop()
        await replica.engine.close()
        await replica.relay.close(0.0)
