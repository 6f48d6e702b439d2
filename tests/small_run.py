"""A run without processes: a learner and its engines, version after version.

Reads   a small model; weights go from learner to engine through a file, as through a slot
Gives   what the probe says of each load, and what the learner says of each batch
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from laminar.actors.trainer import PROBE_TOLERANCE, make_probe, probe_sequences
from laminar.actors.weight_loader import find_probe_failure_reason, probe_difference, source_of
from laminar.config import Config, load_config
from laminar.engines.build import start_engine
from laminar.engines.protocol import GenerateRequest, ReplicaEngine, TokenDelta, WeightSource
from laminar.names.ids import hash64
from laminar.storage.rules import Source, TokenSpan
from laminar.training.learner import Learner, StepResult
from laminar.training.model.policy import LoadedPolicy
from laminar.training.steps import TrainSample
from laminar.weights.version import manifest as mf
from laminar.weights.version.tensors import write_tensors
from tools.kit.one_process import named_weights

GROUPS, SIBLINGS, TOKENS = 4, 8, 24
WAIT_S = 60.0


class Replica:
    """An engine, the version that it is said to have, and what came out of it."""

    engine: ReplicaEngine

    def __init__(self, name: str) -> None:
        self.name, self.version = name, -1
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self._running: set[str] = set()
        self._idle = asyncio.Event()

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            if delta.finish_reason is not None:
                self._running.discard(delta.request_id)
        if not self._running:
            self._idle.set()

    async def generate(self, requests: Sequence[GenerateRequest]) -> None:
        self._running = {request.request_id for request in requests}
        self._idle.clear()
        for request in requests:
            await self.engine.add(request)
        await asyncio.wait_for(self._idle.wait(), WAIT_S)


class SmallRun:
    """Versions are made by `train`, and go to a replica by `load`."""

    def __init__(self, directory: Path, model: Any, vocab_limit: int, *overrides: str) -> None:
        directory.mkdir(exist_ok=True)
        model.config.save_pretrained(directory)
        self.directory, self.limit = directory, vocab_limit
        self.config: Config = load_config(
            [],
            [
                f"model.name={directory}",
                "data.dataset=spell_backward",
                "data.max_prompt_length=64",
                "data.max_response_length=64",
                "rollout.device=cpu",
                "rollout.max_num_seqs=32",
                "rollout.vllm.kv_cache_bytes=16777216",
                "optim.lr=1e-3",
                "weights.dtype=float32",
                *overrides,
            ],
        )
        self.learner = Learner(self.config, LoadedPolicy(model, vocab_limit))
        shapes = [(name, tuple(t.shape)) for name, t in named_weights(model)]
        self.specs = mf.make_layout(shapes, self.config.weights.dtype)
        self.model, self.step = model, 0
        self.replicas: list[Replica] = []
        self.sources: list[WeightSource] = []  #: by version
        text = [np.array(self.prompt(g), "<i4").tobytes() for g in range(16)]
        self.probe_ids = probe_sequences(text, self.config.max_model_len - 1)
        self._rows = 0
        self.publish()

    async def start(self, count: int) -> SmallRun:
        for index in range(count):
            replica = Replica(f"rollout-{len(self.replicas)}")
            replica.engine = await start_engine(self.config, self.limit, index, replica.take)
            self.replicas.append(replica)
        return self

    def take_over(self, other: SmallRun) -> SmallRun:
        """Its replicas, which take seconds to start; `other` is closed all the same."""
        self.replicas = other.replicas
        for replica in self.replicas:
            replica.tokens.clear()
            replica.logprobs.clear()
        return self

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.engine.close()

    def publish(self) -> None:
        """The present weights as the next version."""
        nbytes = mf.check_tensors(self.specs)
        path = self.directory / f"v{len(self.sources)}"
        view = np.memmap(path, dtype=np.uint8, mode="w+", shape=(nbytes,))
        write_tensors(view, self.specs, named_weights(self.model))
        view.flush()
        self.sources.append(source_of(str(path), 0, self.specs, nbytes))

    async def load(self, replica: Replica, version: int = -1) -> str | None:
        """The newest version, or another one that is taken for it; why the probe fails, or
        nothing."""
        replica.version = len(self.sources) - 1
        await replica.engine.load(self.sources[version])
        tolerance = PROBE_TOLERANCE[self.config.weights.dtype]
        probe = make_probe(self.probe_ids, self.learner.compute_logprobs(self.probe_ids), tolerance)
        return find_probe_failure_reason(await probe_difference(replica.engine, probe), probe)

    async def sample(self, replica: Replica, groups: int = GROUPS) -> list[TrainSample]:
        """Groups of responses, as they come from the store; ids below 40 are good."""
        temperature = self.config.rollout.temperature
        requests = {}
        for group in range(self._rows, self._rows + groups):
            for sibling in range(SIBLINGS):
                name = f"0.{group}.{sibling}"
                requests[name] = GenerateRequest(
                    name, self.prompt(group), (), TOKENS, temperature, hash64(name), frozenset()
                )
        self._rows += groups
        await replica.generate(list(requests.values()))
        source = Source(replica.name, replica.version, replica.version)
        return [
            TrainSample(
                sample_id=name,
                group_id=name.rpartition(".")[0],
                prompt_ids=np.array(request.prompt_ids, np.int32),
                response_ids=np.array(replica.tokens[name], np.int32),
                logprobs=np.array(replica.logprobs[name], np.float32),
                reward=float(np.mean(np.array(replica.tokens[name]) < 40)),
                temperature=temperature,
                truncated=True,
                spans=(TokenSpan(*source, len(replica.tokens[name])),),
            )
            for name, request in requests.items()
        ]

    def prompt(self, group: int) -> tuple[int, ...]:
        """They begin alike and come again, as with a system prompt and several passes."""
        own = (hash64("prompt", group % 16, i) % self.limit for i in range(12))
        return (*(hash64("system", i) % self.limit for i in range(32)), *own)

    def train(self, samples: Sequence[TrainSample]) -> StepResult:
        result = self.learner.train_step(samples, self.step)
        self.step += 1
        self.publish()
        return result
