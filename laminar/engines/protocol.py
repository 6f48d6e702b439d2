"""What a rollout replica asks of a generation engine, whichever engine it is.

Reads   GenerateRequest: ids in, sampling settings, what an earlier attempt already generated;
        WeightSource: where the tensors of a version lie
Gives   TokenDelta per sequence and step, EngineStats, StepRecord; EngineError for what is refused

ReplicaEngine is the seam: what the rollout actor sees. Behind it an engine may be a thread of this
process or processes of its own. Ids in, ids out: an engine never sees text.

Engine is what a thread of this process can drive (runner.py): it does nothing by itself, `step` is
one decode step over all running sequences. The caller thus decides between any two steps whether to
add, abort or change the weights, and such an engine needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

STOP = "stop"  #: finish reason: the last token is one of the request's stop ids
LENGTH = "length"  #: finish reason: max_new_tokens were generated


def is_cut_off(finish_reason: str | None) -> bool:
    """Whether something else than the model has ended a response; None: it has not ended."""
    return finish_reason not in (None, STOP)


KvOnUpdate = Literal["keep", "recompute"]
"""What becomes of the cache of sequences that go on with other weights: it is kept, or made again
by a prefill of all their tokens."""


class EngineError(RuntimeError):
    """A request, a config or a set of weights that the engine refuses, or a broken model."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to generate, or to continue after `done_ids`."""

    request_id: str
    prompt_ids: tuple[int, ...]  #: at least one token
    done_ids: tuple[int, ...]  #: generated earlier, elsewhere; empty for a fresh start
    max_new_tokens: int  #: limit of the whole response, `done_ids` included
    temperature: float  #: 0: greedy
    seed: int  #: uint64, of the trajectory; the same after a move
    stop_ids: frozenset[int]  #: sampling one of these ends the response; it is part of it


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request, in order."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]  #: of the distribution sampled from, temperature included; at most 0
    finish_reason: str | None  #: None, STOP or LENGTH; nothing follows a reason
    #: calls of `load` that had begun when all of these were sampled; 0: not said, as no engine does
    #: that loads only while nothing runs
    load: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    kv_used_tokens: int  #: tokens of the running sequences
    kv_capacity_tokens: int
    running: int
    waiting: int  #: added and not yet admitted to a slot
    preempted: int = 0  #: so far: sequences that gave their cache up to others and began again
    prefix_cache_queries: int = 0  #: so far: tokens looked up; 0 for an engine without this cache
    prefix_cache_hits: int = 0  #: so far: tokens found


class StepRecord(NamedTuple):
    """One step of the engine, for decode gaps and for overlap with training."""

    start_ns: int  #: time.monotonic_ns
    end_ns: int
    running: int  #: sequences that got tokens
    tokens: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor, contiguous and row-major; its offset is aligned for its type."""

    name: str  #: Hugging Face's
    dtype: str  #: as torch names it
    shape: tuple[int, ...]
    offset: int  #: bytes from the beginning of the version


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The file that holds a version; its bytes stay as they are while they are read."""

    path: str
    offset: int  #: bytes before the version
    nbytes: int  #: of the version
    tensors: tuple[TensorPlace, ...]


class ReplicaEngine(Protocol):
    """One engine as its replica sees it. Every method is called on the event loop; none blocks it.

    Its maker hands it `on_deltas`, which is called on the loop with the deltas of each
    request in order.
    """

    #: ends with the exception that stopped the engine, or with None after `close`
    failed: asyncio.Future[None]

    def add(self, request: GenerateRequest) -> asyncio.Future[None]:
        """Queue a request; the future fails with EngineError when it can never run."""
        ...

    def abort_request(self, request_id: str) -> asyncio.Future[bool]:
        """Forget a request (False: it is unknown or finished). Once it resolves, no delta of the
        request follows."""
        ...

    def load(
        self, source: WeightSource, on_update: KvOnUpdate | None = None
    ) -> asyncio.Future[None]:
        """Replace all weights by copies, between two steps; nothing of older weights is used
        afterwards, no cache but what `on_update` keeps.

        None: EngineError while a sequence runs; else sequences go on with the new weights. Should
        these give log-probs that are not finite, all requests are dropped, and the next `score`
        fails; once it has answered, the engine itself does.
        EngineError for tensors that are unknown, missing or of another shape; then the engine has
        no weights and no requests.
        """
        ...

    def expect_weights(self) -> asyncio.Future[None]:
        """Give the weights up, as a load does that begins; requests are taken from here on and
        wait, for what `arrived` brings and `go_on` ends. EngineError while a sequence runs."""
        ...

    def load_partial(self, source: WeightSource, num_bytes: int) -> asyncio.Future[None]:
        """The first bytes of a version lie in their place: copy the tensors that are whole, and
        prefill what waits through the layers that are here, if the engine can.

        Asked again with more bytes of the same source; all of them end the load. EngineError as
        `load` has it.
        """
        ...

    def resume_sampling(self) -> asyncio.Future[None]:
        """What arrived is proved: sample what waits."""
        ...

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> asyncio.Future[list[list[float]]]:
        """Log-probs at temperature 1 of tokens 1..L-1 of each sequence; what runs is not touched.

        EngineError for what is not finite.
        """
        ...

    def get_stats(self) -> EngineStats:
        """The engine's state as of the latest step or call."""
        ...

    def drain_steps(self) -> list[StepRecord]:
        """The records since the last drain, in order."""
        ...

    async def close(self) -> None:
        """Drop all requests, stop, and release what the engine holds."""
        ...


class Engine(Protocol):
    """An engine that one thread drives; every method is called from it."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; EngineError when it can never run (too long, unknown ids, ...)."""
        ...

    def abort_request(self, request_id: str) -> bool:
        """Forget a request; False when it is unknown or finished. No delta of it follows."""
        ...

    def step(self) -> list[TokenDelta]:
        """Admit what waits, then one decode step; [] when there is nothing to do.

        EngineError when work waits and no weights are loaded, or the log-probs are not finite;
        in the second case all requests are dropped.
        """
        ...

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], on_update: KvOnUpdate | None = None
    ) -> None:
        """Replace all weights by copies of `tensors` (Hugging Face names).

        EngineError for a tensor that is unknown, missing, given twice or of another shape; what
        `on_update` means, and what is left after an error, ReplicaEngine.load says.
        """
        ...

    def expect_weights(self) -> None:
        """As ReplicaEngine has it; `step` is not called before `go_on` there."""
        ...

    def load_partial(self, tensors: Iterable[tuple[str, torch.Tensor]], last: bool) -> None:
        """The next tensors of the version that is expected, each given once; what waits is
        prefilled behind them. EngineError as `load_weights` has it."""
        ...

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of tokens 1..L-1 of each sequence; what runs is not touched.

        EngineError for what `step` raises too: log-probs that are not finite are never returned.
        """
        ...

    def get_stats(self) -> EngineStats:
        """A cheap snapshot."""
        ...

    def close(self) -> None:
        """Drop all requests and release what the engine holds."""
        ...
