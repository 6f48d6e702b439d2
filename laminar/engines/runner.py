"""A thread that drives an engine: the ReplicaEngine (protocol.py) of in-process engines.

Reads   requests and calls from the loop; Engine.step results
Gives   deltas to `on_deltas` on the loop; one StepRecord per step; `failed`

A decode step blocks its thread for milliseconds to seconds, which an event loop cannot afford.
All engine calls happen on the one engine thread, between two steps, so no engine needs locks.
Results reach the loop in order: when `abort_request` or `call_engine` resolves, every delta
produced before it has been passed to `on_deltas`. A slow loop gets deltas of several steps in one
call rather than a growing queue of callbacks.

Sequences that continue with new weights step before these are proved, and broken weights may break
the step. That is not a failure of the engine; its requests are dropped, and `compute_logprobs`, the
proof, reports the error. While weights are expected, no step runs before `resume_sampling`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from laminar.engines.protocol import (
    Engine,
    EngineError,
    EngineStats,
    EngineStep,
    GenerateRequest,
    KvOnUpdate,
    TokenDelta,
    WeightSource,
)
from laminar.engines.weight_file import MappedWeights, whole_among

T = TypeVar("T")

MAX_STEP_RECORDS = 65_536  #: limit between two drains; the oldest are dropped first


class _Job(NamedTuple):
    run: Callable[[Engine], Any]
    future: asyncio.Future[Any]


class EngineRunner:
    """The engine's thread; all methods are called from the loop's thread."""

    def __init__(
        self,
        engine: Engine,
        on_deltas: Callable[[list[TokenDelta]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start the thread; `on_deltas` runs on `loop`, with a request's deltas in order."""
        self._engine, self._on_deltas, self._loop = engine, on_deltas, loop
        #: resolves with the exception that stopped the engine, or with None after `close`
        self.failed: asyncio.Future[None] = loop.create_future()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._steps: deque[EngineStep] = deque(maxlen=MAX_STEP_RECORDS)
        self._undelivered: list[TokenDelta] = []
        self._delivery_due = False
        self._lock = threading.Lock()  # guards the two above
        self._stats = engine.get_stats()
        self._weights = MappedWeights()
        self._proved = True  #: whether scores succeeded since the last load, or nothing ran then
        self._broken: EngineError | None = None  #: error of a step before the proof
        self._held = False  #: whether weights are expected and no step runs
        self._given = 0  #: number of expected tensors that the engine has
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def add(self, request: GenerateRequest) -> asyncio.Future[None]:
        """Queue a request; the future fails with EngineError if the engine refuses it."""
        return self.call_engine(lambda engine: engine.add(request))

    def abort_request(self, request_id: str) -> asyncio.Future[bool]:
        """Drop a request; no delta of it follows the result."""
        return self.call_engine(lambda engine: engine.abort_request(request_id))

    def load(
        self, source: WeightSource, on_update: KvOnUpdate | None = None
    ) -> asyncio.Future[None]:
        """Copy a version into the engine."""
        return self.call_engine(lambda engine: self._load(engine, source, on_update))

    def expect_weights(self) -> asyncio.Future[None]:
        return self.call_engine(self._expect_weights)

    def load_partial(self, source: WeightSource, num_bytes: int) -> asyncio.Future[None]:
        """Copy tensors of a version that is still being written, in the order of its table."""
        return self.call_engine(lambda engine: self._load_partial(engine, source, num_bytes))

    def resume_sampling(self) -> asyncio.Future[None]:
        return self.call_engine(self._resume_sampling)

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> asyncio.Future[list[list[float]]]:
        """Return log-probs at temperature 1 of tokens 1..L-1 of each sequence."""
        return self.call_engine(lambda engine: self._compute_logprobs(engine, sequences))

    def call_engine(self, fn: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Run fn(engine) on the engine's thread between steps; return a future of its outcome."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self.failed.done():
            future.set_exception(EngineError("the engine's thread has stopped"))
        else:
            self._jobs.put(_Job(fn, future))
        return future

    def get_stats(self) -> EngineStats:
        """Return the engine's state as of the latest step or call."""
        return self._stats

    def drain_steps(self) -> list[EngineStep]:
        """Return the records since the last call, in order."""
        records = []
        while self._steps:
            records.append(self._steps.popleft())
        return records

    async def close(self) -> None:
        """Stop after the current step, close the engine and end the thread."""
        self._jobs.put(None)
        await asyncio.wait([self.failed])
        self._thread.join()

    def _main(self) -> None:
        """Run the engine thread."""
        cause: Exception | None = None
        try:
            while self._run_jobs():
                if self._has_work():
                    self._step()
            self._engine.close()
        except Exception as error:
            cause = error
        self._loop.call_soon_threadsafe(self._finish_thread, cause)

    def _run_jobs(self) -> bool:
        """Run the jobs of the loop, waiting for one when idle; return False to close."""
        wait = not self._has_work()
        while True:
            try:
                job = self._jobs.get(block=wait)
            except Empty:
                return True
            if job is None:
                return False
            self._run_job(job)
            wait = False

    def _run_job(self, job: _Job) -> None:
        try:
            value, error = job.run(self._engine), None
            self._stats = self._engine.get_stats()
        except Exception as caught:
            value, error = None, caught
        self._loop.call_soon_threadsafe(_resolve_future, job.future, value, error)

    def _has_work(self) -> bool:
        return not self._held and self._stats.running + self._stats.waiting > 0

    def _expect_weights(self, engine: Engine) -> None:
        self._broken, self._proved, self._given = None, True, 0
        engine.expect_weights()
        self._held = True

    def _load_partial(self, engine: Engine, source: WeightSource, num_bytes: int) -> None:
        count = whole_among(source.tensors, num_bytes)
        tensors = islice(self._weights.iter_tensors(source), self._given, count)
        self._given = count
        engine.load_partial(tensors, last=num_bytes >= source.nbytes)

    def _resume_sampling(self, engine: Engine) -> None:
        self._held = False

    def _load(self, engine: Engine, source: WeightSource, on_update: KvOnUpdate | None) -> None:
        self._broken, self._proved = None, on_update is None
        self._held = self._held and on_update is not None
        engine.load_weights(self._weights.iter_tensors(source), on_update)

    def _compute_logprobs(
        self, engine: Engine, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        if self._broken is not None:
            raise self._broken
        scores = engine.compute_logprobs(sequences)
        self._proved = True
        return scores

    def _step(self) -> None:
        start = time.monotonic_ns()
        try:
            deltas = self._engine.step()
        except EngineError as error:
            return self._handle_step_error(error)
        end = time.monotonic_ns()
        self._stats = self._engine.get_stats()
        tokens = sum(len(delta.token_ids) for delta in deltas)
        self._steps.append(EngineStep(start, end, len(deltas), tokens))
        with self._lock:
            self._undelivered += deltas
            due = bool(self._undelivered) and not self._delivery_due
            self._delivery_due |= due
        if due:
            self._loop.call_soon_threadsafe(self._deliver_deltas)

    def _handle_step_error(self, error: EngineError) -> None:
        """Blame weights that are not proved for a failed step; otherwise raise the error."""
        if self._proved:
            raise error
        self._broken = error
        self._engine.close()
        self._stats = self._engine.get_stats()

    def _deliver_deltas(self) -> None:
        """Pass all deltas so far to the callback, on the loop."""
        with self._lock:
            deltas, self._undelivered = self._undelivered, []
            self._delivery_due = False
        self._on_deltas(deltas)

    def _finish_thread(self, cause: Exception | None) -> None:
        """Resolve all futures before the thread ends; called once, on the loop."""
        if cause is None:
            self.failed.set_result(None)
        else:
            self.failed.set_exception(cause)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                _resolve_future(job.future, None, EngineError("the engine's thread has stopped"))


def _resolve_future(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
