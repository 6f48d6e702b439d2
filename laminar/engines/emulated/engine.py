"""The emulated engine: takes the real time of an engine with a model, and computes nothing.

Reads   emulation.*, rollout.max_num_seqs, data.max_response_length; the bytes of weight versions
Gives   EmulatedEngine, a ReplicaEngine; make_fake_logprobs

Without torch. The weights are read as a real engine would read them, from the relay's file, and
the scores of a probe depend on every byte of them: a replica with weights other than claimed is
detected like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from laminar.config import Config
from laminar.engines import protocol
from laminar.engines.emulated.clock_engine import ClockEngine, EmulatedResponse, OnDeltas
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.engines.mapped_file import FileBytes, MappedFile
from laminar.names.ids import hash64

NUM_FAKE_LOGPROBS = 4096  #: number of distinct made-up log-probs


class RealTimer:
    """The real time of this process."""

    slow = 1.0

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def call_later(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay_ns / 1e9, action, *args)


class EmulatedEngine(ClockEngine):
    """The engine of one emulated replica."""

    def __init__(self, config: Config, on_deltas: OnDeltas) -> None:
        emulation, limit = config.emulation, config.data.max_response_length
        self._lengths = ResponseLengths(median=emulation.median_response, limit=limit)
        self._file, self._fingerprint = MappedFile(), ""
        self._steps: list[protocol.EngineStep] = []
        self._tokens, self._from_ns = 0, time.monotonic_ns()
        self._replica_on_deltas = on_deltas
        self._timing = EngineTiming(
            step_us=emulation.step_us,
            sequence_us=emulation.sequence_us,
            token_us=emulation.token_us,
            prefill_tokens_per_s=emulation.prefill_tokens_per_s,
            cache_tokens=emulation.kv_capacity_tokens,
        )
        super().__init__(
            RealTimer(),
            self._timing,
            slots=config.rollout.max_num_seqs,
            kv_capacity=emulation.kv_capacity_tokens,
            on_deltas=self._deliver_deltas,
            on_ends=self._deliver_deltas,
        )

    def add(self, request: protocol.GenerateRequest) -> asyncio.Future[None]:
        if not self._fingerprint and not self.clock.held:
            return self._make_done_future(protocol.EngineError("the engine has no weights"))
        if not self.clock.sequences:
            self._from_ns = time.monotonic_ns()
        total = max(self._lengths.draw_length(request.seed), len(request.done_ids) + 1)
        self.clock.add(EmulatedResponse(request, total))
        return self._make_done_future()

    def load(
        self, source: protocol.WeightSource, on_update: protocol.KvOnUpdate | None = None
    ) -> asyncio.Future[None]:
        refused, self._fingerprint = self._begin_load(on_update), ""
        if refused is not None:
            return self._make_done_future(refused)
        return asyncio.ensure_future(self._load(source, on_update))

    async def _load(
        self, source: protocol.WeightSource, on_update: protocol.KvOnUpdate | None
    ) -> None:
        try:
            self._fingerprint = await asyncio.to_thread(self._read, source)
        except protocol.EngineError:
            self._abort_all()
            raise
        finally:
            self._end_load(on_update)

    def expect_weights(self) -> asyncio.Future[None]:
        self._fingerprint = ""
        return super().expect_weights()

    def load_partial(self, source: protocol.WeightSource, num_bytes: int) -> asyncio.Future[None]:
        whole = num_bytes == source.nbytes
        return asyncio.ensure_future(self._copy(source)) if whole else self._make_done_future()

    async def _copy(self, source: protocol.WeightSource) -> None:
        self._fingerprint = await asyncio.to_thread(self._read, source)

    def _read(self, source: protocol.WeightSource) -> str:
        return fingerprint_weights(
            self._file.map_source(source)[source.offset : source.offset + source.nbytes]
        )

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> asyncio.Future[list[list[float]]]:
        scores: asyncio.Future[list[list[float]]] = self._loop.create_future()
        scores.set_result(make_fake_logprobs(self._fingerprint, sequences))
        return scores

    def drain_steps(self) -> list[protocol.EngineStep]:
        """Return step records: between two reports one step as it was, and the rest as one."""
        self._record_steps()
        steps, self._steps = self._steps, []
        return steps

    def _deliver_deltas(self, deltas: list[protocol.TokenDelta]) -> None:
        self._tokens += sum(len(delta.token_ids) for delta in deltas)
        if not self.clock.sequences:  # the engine is idle from here on
            self._record_steps()
        self._replica_on_deltas(deltas)

    def _record_steps(self) -> None:
        now, tokens, running = time.monotonic_ns(), self._tokens, self.clock.running
        begun, self._from_ns, self._tokens = self._from_ns, now, 0
        if running and tokens > running:
            step_ns = self._timing.step_ns(running, self.clock.batch.cached)
            end = min(begun + int(step_ns), now)
            self._steps.append(protocol.EngineStep(begun, end, running, running))
            begun, tokens = end, tokens - running
        if tokens:
            self._steps.append(protocol.EngineStep(begun, now, 0, tokens))


def fingerprint_weights(weights: FileBytes) -> str:
    """Return the digest of all bytes of a version."""
    return xxhash.xxh3_128_hexdigest(weights.data)


def make_fake_logprobs(weights: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return log-probs of tokens 1..L-1 of each sequence, determined by a weight fingerprint."""
    return [
        [
            -(1 + hash64(weights, token) % NUM_FAKE_LOGPROBS) / NUM_FAKE_LOGPROBS
            for token in sequence[1:]
        ]
        for sequence in sequences
    ]
