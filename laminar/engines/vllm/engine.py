"""vLLM behind the seam: an AsyncLLM, whose engine core and workers are separate processes.

Reads   GenerateRequests, WeightSources, also while sequences run; the core's report on each step
Gives   deltas to `on_deltas` on the loop (laminar/engines/vllm/requests.py), StepRecords,
        EngineStats; `failed`

Ids in, ids out, with the processed log-probs of the sampled tokens. Requests have no seeds: vLLM
cannot continue a seeded request elsewhere, so the engine has one seed and a sampled trajectory that
migrates continues with other tokens of the same distribution.

Every wait has a deadline: a call to a core that dies meanwhile never returns, and a frozen core
keeps vLLM's health check green.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.v1.engine import PauseMode
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from laminar.engines.protocol import (
    EngineError,
    EngineStats,
    EngineStep,
    GenerateRequest,
    KvOnUpdate,
    TokenDelta,
    WeightSource,
)
from laminar.engines.requests import check_request, check_sequence
from laminar.engines.vllm.output import ProcessOutput
from laminar.engines.vllm.requests import NOT_FINITE, ActiveRequests
from laminar.names.process_end import describe_exit

T = TypeVar("T")

RPC_TIMEOUT_S = 60.0  #: pause, reset, resume and abort take milliseconds
LOAD_TIMEOUT_S = 600.0
"""Copying and packing a version takes a second per gigabyte, ten on a slow machine."""
STALL_TIMEOUT_S = 60.0
"""Time without a step after which a core with work counts as dead; a prefill is chunked."""
WATCH_INTERVAL_S = 1.0
MAX_STEP_RECORDS = 65_536  #: limit between two drains; the oldest are dropped first


class Gauges(StatLoggerBase):
    """Figures of the core's latest step; vLLM calls `record` on the event loop."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.kv_used = 0.0  #: share of the cache
        self.running = self.waiting = self.preempted = 0
        self.prefix_queries = self.prefix_hits = 0  #: tokens
        self.steps: deque[EngineStep] = deque(maxlen=MAX_STEP_RECORDS)
        self.last_ns = time.monotonic_ns()  #: end of a step, or arrival of work at an idle engine

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.kv_used = scheduler_stats.kv_cache_usage
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs
            self.prefix_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        now = time.monotonic_ns()
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs
            tokens = iteration_stats.num_generation_tokens
            if tokens:
                self.steps.append(EngineStep(self.last_ns, now, tokens, tokens))
        self.last_ns = now

    def log_engine_initialized(self) -> None:
        pass


class VllmEngine:
    """ReplicaEngine (protocol.py) over vLLM; made by start.py."""

    def __init__(
        self,
        llm: AsyncLLM,
        gauges: Gauges,
        thread: Executor,
        on_deltas: Callable[[list[TokenDelta]], None],
        printed: ProcessOutput,
        *,
        max_model_len: int,
        vocab_limit: int,
    ) -> None:
        """Set up; `thread` is the thread that started the core, and ends with the engine."""
        self._llm, self._gauges, self._thread = llm, gauges, thread
        self._max_model_len, self._vocab_limit = max_model_len, vocab_limit
        self._printed, self._loop = printed, asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._loaded = False
        self._running = ActiveRequests(llm, on_deltas, self._given_up)
        self._loads = 0  #: loads that have begun
        self._proved = True  #: whether scores succeeded since the last load, or nothing ran then
        self._broken = False  #: whether samples or scores since the last load were not finite
        self._scored = 0
        cache = llm.vllm_config.cache_config
        self._kv_capacity = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        self._core = llm.engine_core.resources.engine_manager.processes[0]
        self._watcher = self._loop.create_task(self._watch_core())

    async def initialize_workers(self) -> None:
        """Initialize the workers, once and first; EngineError if the core does not answer."""
        call = self._llm.collective_rpc("laminar_begin", args=(self._vocab_limit,))
        await self._call_core(RPC_TIMEOUT_S, "its first call", call)

    def add(self, request: GenerateRequest) -> asyncio.Future[None]:
        accepted: asyncio.Future[None] = self._loop.create_future()
        try:
            self._check_request(request)
        except EngineError as error:
            accepted.set_exception(error)
            return accepted
        if not self._running:
            self._gauges.last_ns = time.monotonic_ns()
        self._running.add(request)
        accepted.set_result(None)
        return accepted

    def abort_request(self, request_id: str) -> asyncio.Future[bool]:
        call = self._call_core(RPC_TIMEOUT_S, "an abort", self._running.abort_request(request_id))
        return self._loop.create_task(call)

    def load(
        self, source: WeightSource, on_update: KvOnUpdate | None = None
    ) -> asyncio.Future[None]:
        self._loads += 1
        return self._loop.create_task(self._load(source, on_update))

    def expect_weights(self) -> asyncio.Future[None]:
        raise EngineError("vLLM loads whole versions only; set rollout.load = whole")

    def load_partial(self, source: WeightSource, num_bytes: int) -> asyncio.Future[None]:
        return self.expect_weights()

    def resume_sampling(self) -> asyncio.Future[None]:
        return self.expect_weights()

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> asyncio.Future[list[list[float]]]:
        return self._loop.create_task(self._compute_logprobs(sequences))

    def get_stats(self) -> EngineStats:
        gauges = self._gauges
        return EngineStats(
            kv_used_tokens=round(gauges.kv_used * self._kv_capacity),
            kv_capacity_tokens=self._kv_capacity,
            running=gauges.running,
            waiting=max(len(self._running) - gauges.running, 0),
            preempted=gauges.preempted,
            prefix_cache_queries=gauges.prefix_queries,
            prefix_cache_hits=gauges.prefix_hits,
        )

    def drain_steps(self) -> list[EngineStep]:
        records = list(self._gauges.steps)
        self._gauges.steps.clear()
        return records

    async def close(self) -> None:
        self._watcher.cancel()
        self._running.drop_all()
        await self._loop.run_in_executor(self._thread, self._llm.shutdown)
        self._thread.shutdown(wait=False)
        if not self.failed.done():
            self.failed.set_result(None)

    def _check_request(self, request: GenerateRequest) -> None:
        self._require_alive()
        self._require_weights()
        if request.request_id in self._running:
            raise EngineError(f"request {request.request_id} is already running; abort it first")
        check_request(request, self._max_model_len, self._vocab_limit)

    # --- weights ------------------------------------------------------------------------------

    async def _load(self, source: WeightSource, on_update: KvOnUpdate | None) -> None:
        self._require_alive()
        if on_update is None:
            self._require_idle("load weights")
            self._loaded = False
        self._proved = on_update is None
        label = str(self._loads)
        self._running.pause_sampling()
        try:
            failure = await self._replace_weights(source, on_update, label)
            if failure:
                raise EngineError(failure)
            self._loaded = True
        except EngineError:
            self._loaded = False
            self._running.drop_all()
            raise
        finally:
            self._gauges.last_ns = time.monotonic_ns()
            self._running.resume_sampling()

    async def _replace_weights(
        self, source: WeightSource, on_update: KvOnUpdate | None, label: str
    ) -> str | None:
        """Replace the weights between two steps of the core; return an error, if any."""
        llm, keeps = self._llm, on_update == "keep"
        mode: PauseMode = "abort" if on_update is None else "keep"
        pause = llm.pause_generation(mode=mode, clear_cache=not keeps)
        await self._call_core(RPC_TIMEOUT_S, "a pause", pause)
        if keeps:
            await self._call_core(RPC_TIMEOUT_S, "an abort", self._running.change_salt(label))
        table = [(t.name, t.dtype, list(t.shape), t.offset) for t in source.tensors]
        where = (source.path, source.offset, source.nbytes, table, self._broken)
        answers = await self._call_core(
            LOAD_TIMEOUT_S, "a weight load", llm.collective_rpc("laminar_load", args=where)
        )
        # Refused while a sequence has blocks: so it also proves that the pause has cleared them.
        cleared = keeps or await self._call_core(
            RPC_TIMEOUT_S, "a cache reset", llm.reset_prefix_cache()
        )
        self._broken = False
        await self._call_core(RPC_TIMEOUT_S, "a label", llm.update_weight_version(label))
        failures = [answer for answer in answers if answer]
        if not cleared:
            failures.append("vLLM kept cached keys and values of the old weights")
        if failures:
            self._running.drop_all()
        await self._call_core(RPC_TIMEOUT_S, "a resume", llm.resume_generation())
        return failures[0] if failures else None

    async def _compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._require_alive()
        self._require_weights()
        for index, ids in enumerate(sequences):
            check_sequence(f"sequence {index}", ids, self._max_model_len - 1, self._vocab_limit)
        rows = asyncio.gather(*(self._score_one(list(ids)) for ids in sequences))
        scores: list[list[float]] = await self._call_core(LOAD_TIMEOUT_S, "a score", rows)
        self._broken |= not all(math.isfinite(score) for row in scores for score in row)
        if self._broken:
            raise EngineError(f"{NOT_FINITE}; load other weights")
        self._proved = True
        return scores

    async def _score_one(self, ids: list[int]) -> list[float]:
        """Return prompt log-probs, which vLLM computes without its prefix cache."""
        self._scored += 1
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        found: Any = None
        async for output in self._llm.generate(
            {"prompt_token_ids": ids}, params, f"score-{self._scored}"
        ):
            found = output.prompt_logprobs or found
        return [row[token].logprob for row, token in zip(found[1:], ids[1:], strict=True)]

    # --- liveness -----------------------------------------------------------------------------

    def _require_alive(self) -> None:
        if self.failed.done():
            cause = self.failed.exception()
            raise EngineError(f"the engine has stopped{f': {cause}' if cause else ''}")

    def _require_weights(self) -> None:
        if not self._loaded:
            raise EngineError("the engine has no weights; call load first")

    def _require_idle(self, what: str) -> None:
        if self._running:
            raise EngineError(
                f"cannot {what} while {len(self._running)} sequences are running; "
                "finish or abort them first"
            )

    async def _call_core(self, seconds: float, what: str, call: Awaitable[T]) -> T:
        """Call the core, with a timeout; EngineError if it is dead, frozen, or fails."""
        try:
            return await asyncio.wait_for(call, seconds)
        except TimeoutError:
            self._fail_engine(f"vLLM's engine core did not answer {what} within {seconds:.0f} s")
        except EngineDeadError:
            self._fail_engine(self._describe_death())
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM's engine core failed at {what}: {error}") from error
        raise EngineError(str(self.failed.exception()))

    async def _watch_core(self) -> None:
        """Detect a core that dies while idle, and one that is frozen."""
        while not self.failed.done():
            await asyncio.sleep(WATCH_INTERVAL_S)
            still_s = (time.monotonic_ns() - self._gauges.last_ns) / 1e9
            if self._llm.errored:
                self._fail_engine(self._describe_death())
            elif self._running and not self._running.is_paused and still_s > STALL_TIMEOUT_S:
                self._fail_engine(
                    f"vLLM's engine core is alive but has finished no step for {still_s:.0f} s, "
                    f"with {len(self._running)} requests running"
                )

    def _describe_death(self) -> str:
        """Describe the core's death in a sentence, if possible in its own words."""
        code = self._core.exitcode
        if code is None or code >= 0:
            return f"vLLM's engine core has died: {self._printed.find_failure()}"
        memory = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL else ""
        return f"vLLM's engine core has died, {describe_exit(code)}{memory}"

    def _given_up(self, request_id: str, error: Exception | str) -> None:
        if isinstance(error, EngineDeadError):
            self._fail_engine(self._describe_death())
        elif error == NOT_FINITE and not self._proved:
            self._broken = True
            self._running.drop_all()
        elif isinstance(error, str):
            self._fail_engine(error)
        else:
            self._fail_engine(f"vLLM failed request {request_id}: {type(error).__name__}: {error}")

    def _fail_engine(self, why: str) -> None:
        """Fail the engine, once, and drop all requests: no answer can come."""
        if not self.failed.done():
            self.failed.set_exception(EngineError(why))
            self._running.drop_all()
