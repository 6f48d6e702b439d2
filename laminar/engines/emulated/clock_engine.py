"""An engine without a model: made-up tokens at the pace of a real engine.

Reads   GenerateRequest; the length of each response; a clock (batch_clock.py)
Gives   TokenDelta, EngineStats, in the way that replicas ask for them (protocol.py)

Base of the simulator's engine and the emulated one. Tokens are delivered on a query of the engine's
progress and at the end of a response, not step by step: hundreds of such engines share a core.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from laminar.engines import protocol
from laminar.engines.emulated.batch_clock import BatchClock, ClockSequence, Timer
from laminar.engines.emulated.fake_tokens import make_logprobs, make_tokens
from laminar.engines.emulated.timing import EngineTiming

OnDeltas = Callable[[list[protocol.TokenDelta]], None]


class EmulatedResponse(ClockSequence):
    """A sequence of the clock, with the fields of its request."""

    __slots__ = ("limit", "seed", "sent", "spoiled")

    def __init__(self, request: protocol.GenerateRequest, total: int, hangs: bool = False) -> None:
        done, prompt = len(request.done_ids), len(request.prompt_ids)
        self.limit = request.max_new_tokens
        super().__init__(request.request_id, done, min(total, self.limit), hangs, prompt)
        self.seed, self.sent, self.spoiled = request.seed, done, False


class ClockEngine:
    """The part of ReplicaEngine (protocol.py) that needs no weights."""

    def __init__(
        self,
        timer: Timer,
        timing: EngineTiming,
        *,
        slots: int,
        kv_capacity: int,
        on_deltas: OnDeltas,
        on_ends: OnDeltas,
    ) -> None:
        """Set up; `on_ends` takes the final deltas of responses.

        `kv_capacity`: reported capacity of a cache without limit."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._capacity = timing.cache_tokens or kv_capacity
        self._on_deltas, self._on_ends = on_deltas, on_ends
        self._loads = 0
        self.clock = BatchClock(timer, timing, slots, self._on_finished)

    def _make_done_future(self, error: Exception | None = None) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        return done

    def _begin_load(self, on_update: protocol.KvOnUpdate | None) -> protocol.EngineError | None:
        """Stop sampling until `_end_load`; return an EngineError if no load may begin."""
        self._deliver_tokens()
        if finished := self.clock.take_finished():
            self._on_deltas(self._build_final_deltas(finished))
        self._loads += 1
        if on_update is None and self.clock.sequences:
            return protocol.EngineError("weights cannot be loaded while a sequence runs")
        self.clock.pause_sampling()
        return None

    def _abort_all(self) -> None:
        """Abort all sequences after a failed load."""
        for request_id in list(self.clock.sequences):
            self.clock.abort_sequence(request_id)

    def _end_load(self, on_update: protocol.KvOnUpdate | None) -> None:
        self.clock.resume_sampling(prefills=on_update == "recompute")

    def expect_weights(self) -> asyncio.Future[None]:
        return self._make_done_future(self._begin_load(None))

    def resume_sampling(self) -> asyncio.Future[None]:
        self._end_load(None)
        return self._make_done_future()

    def abort_request(self, request_id: str) -> asyncio.Future[bool]:
        """Deliver the tokens sampled so far, then abort."""
        self._deliver_tokens()
        found: asyncio.Future[bool] = self._loop.create_future()
        found.set_result(request_id in self.clock.sequences)
        self.clock.abort_sequence(request_id)
        return found

    def get_stats(self) -> protocol.EngineStats:
        """Deliver the tokens sampled so far, and return the state."""
        self._deliver_tokens()
        running, batch = self.clock.running, self.clock.batch
        return protocol.EngineStats(
            batch.cached, self._capacity, running, batch.waiting, batch.preempted
        )

    def drain_steps(self) -> list[protocol.EngineStep]:
        return []

    async def close(self) -> None:
        if not self.failed.done():
            self.failed.set_result(None)

    def _deliver_tokens(self) -> int:
        """Deliver the tokens sampled so far; return their number."""
        self.clock.advance_to_now()
        deltas = []
        for response in self.clock.sequences.values():
            assert isinstance(response, EmulatedResponse)
            tokens = min(
                self.clock.count_tokens(response), response.total - 1
            )  # the last one ends it
            if tokens > response.sent:
                deltas.append(self._build_delta(response, tokens, None))
        if deltas:
            self._on_deltas(deltas)
        return sum(len(delta.token_ids) for delta in deltas)

    def _on_finished(self, finished: list[ClockSequence]) -> None:
        self._on_ends(self._build_final_deltas(finished))

    def _build_final_deltas(self, finished: list[ClockSequence]) -> list[protocol.TokenDelta]:
        deltas = []
        for response in finished:
            assert isinstance(response, EmulatedResponse)
            reason = protocol.LENGTH if response.total >= response.limit else protocol.STOP
            deltas.append(self._build_delta(response, response.total, reason))
        return deltas

    def _build_delta(
        self, response: EmulatedResponse, end: int, reason: str | None
    ) -> protocol.TokenDelta:
        start, response.sent = response.sent, end
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(make_tokens(response.seed, start, end, ends=reason == protocol.STOP))
        logprobs.frombytes(make_logprobs(response.seed, start, end, spoiled=response.spoiled))
        return protocol.TokenDelta(response.id, tokens, logprobs, reason, self._loads)
