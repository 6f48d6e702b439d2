"""Interface between a rollout replica and its generation engine.

Reads   GenerateRequest: ids in, sampling settings, tokens that an earlier attempt generated;
        WeightSource: the location of a version's tensors
Gives   TokenDelta per sequence and step, EngineStats, StepRecord; EngineError for refused input

ReplicaEngine is the seam: the rollout actor's view. Behind it an engine may be a thread of this
process or separate processes. Ids in, ids out: an engine never sees text.

Engine is the interface for a thread of this process (runner.py): it does nothing by itself, `step`
is one decode step over all running sequences. The caller thus decides between any two steps whether
to add, abort or change the weights, and such an engine needs no lock.
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
    """Return whether a response was ended by something other than the model; None: not ended."""
    return finish_reason not in (None, STOP)


KvOnUpdate = Literal["keep", "recompute"]
"""Treatment of the cache of sequences that continue with other weights: kept, or recomputed by a
prefill of all their tokens."""


class EngineError(RuntimeError):
    """Refusal of a request, a config or a set of weights, or failure of a broken model."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A response to generate, or to continue after `done_ids`."""

    request_id: str
    prompt_ids: tuple[int, ...]  #: at least one token
    done_ids: tuple[int, ...]  #: generated earlier, elsewhere; empty: a new response
    max_new_tokens: int  #: limit of the whole response, `done_ids` included
    temperature: float  #: 0: greedy
    seed: int  #: uint64, of the trajectory; unchanged by a migration
    stop_ids: frozenset[int]  #: ids that end the response, and belong to it


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request, in order."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]  #: of the distribution sampled from, temperature included; at most 0
    finish_reason: str | None  #: None, STOP or LENGTH; nothing follows a reason
    #: calls of `load` that had begun when all of these were sampled; 0: unknown, as for an engine
    #: that loads only while nothing runs
    load: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    kv_used_tokens: int  #: tokens of the running sequences
    kv_capacity_tokens: int
    running: int
    waiting: int  #: added and not yet admitted to a slot
    preempted: int = 0  #: so far: times that a sequence lost its cache and restarted
    prefix_cache_queries: int = 0  #: so far: tokens looked up; 0 for an engine without this cache
    prefix_cache_hits: int = 0  #: so far: tokens found


class EngineStep(NamedTuple):
    """A step of the engine, for decode gaps and for overlap with training."""

    start_ns: int  #: from time.monotonic_ns
    end_ns: int
    running: int  #: sequences that got tokens
    tokens: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Location of a tensor, contiguous and row-major, with an offset aligned for its type."""

    name: str  #: Hugging Face name
    dtype: str  #: torch name
    shape: tuple[int, ...]
    offset: int  #: bytes from the beginning of the version


@dataclass(frozen=True, slots=True)
class WeightSource:
    """File that has a version; its bytes do not change while they are read."""

    path: str
    offset: int  #: bytes before the version
    nbytes: int  #: bytes of the version
    tensors: tuple[TensorPlace, ...]


class ReplicaEngine(Protocol):
    """An engine as its replica sees it; methods are called on the event loop and never block it.

    The constructor takes `on_deltas`, which is called on the loop with the deltas of each
    request in order.
    """

    #: resolves with the exception that stopped the engine, or with None after `close`
    failed: asyncio.Future[None]

    def add(self, request: GenerateRequest) -> asyncio.Future[None]:
        """Queue a request; the future fails with EngineError if it can never run."""
        ...

    def abort_request(self, request_id: str) -> asyncio.Future[bool]:
        """Drop a request (False: unknown or finished); no delta of it follows the result."""
        ...

    def load(
        self, source: WeightSource, on_update: KvOnUpdate | None = None
    ) -> asyncio.Future[None]:
        """Replace all weights by copies, between two steps.

        Nothing of older weights is used afterwards, no cache except what `on_update` keeps.
        None: EngineError while a sequence runs; else sequences continue with the new weights. If
        these give log-probs that are not finite, all requests are dropped, and the next
        `compute_logprobs` fails; once that has succeeded, the engine itself fails.
        EngineError for tensors that are unknown, missing or of another shape; then the engine has
        no weights and no requests.
        """
        ...

    def expect_weights(self) -> asyncio.Future[None]:
        """Drop the weights, as the start of a load does; EngineError while a sequence runs.

        Requests are accepted but wait for `load_partial` and `resume_sampling`."""
        ...

    def load_partial(self, source: WeightSource, num_bytes: int) -> asyncio.Future[None]:
        """Copy the tensors that lie completely in the first bytes of a version.

        Waiting requests are prefilled through the layers that are loaded, if the engine can.
        Called again with more bytes of the same source; all of them end the load. Raises
        EngineError as `load` does.
        """
        ...

    def resume_sampling(self) -> asyncio.Future[None]:
        """Sample the waiting requests, once the loaded weights are proved."""
        ...

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> asyncio.Future[list[list[float]]]:
        """Return log-probs at temperature 1 of tokens 1..L-1 of each sequence.

        Running sequences are not affected. EngineError for log-probs that are not finite.
        """
        ...

    def get_stats(self) -> EngineStats:
        """Return the engine's state as of the latest step or call."""
        ...

    def drain_steps(self) -> list[EngineStep]:
        """Return the records since the last call, in order."""
        ...

    async def close(self) -> None:
        """Drop all requests, stop, and release the engine's resources."""
        ...


class Engine(Protocol):
    """An engine that one thread drives; every method is called from that thread."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; EngineError if it can never run (too long, unknown ids, ...)."""
        ...

    def abort_request(self, request_id: str) -> bool:
        """Drop a request; False: unknown or finished. No delta of it follows."""
        ...

    def step(self) -> list[TokenDelta]:
        """Admit waiting requests, then make one decode step; [] if there is nothing to do.

        EngineError if requests wait without weights, or if log-probs are not finite; in the second
        case all requests are dropped.
        """
        ...

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], on_update: KvOnUpdate | None = None
    ) -> None:
        """Replace all weights by copies of `tensors` (Hugging Face names).

        EngineError for a tensor that is unknown, missing, given twice or of another shape; for
        `on_update` and the state after an error see ReplicaEngine.load.
        """
        ...

    def expect_weights(self) -> None:
        """Do as ReplicaEngine's method; `step` is not called before its `resume_sampling`."""
        ...

    def load_partial(self, tensors: Iterable[tuple[str, torch.Tensor]], last: bool) -> None:
        """Take the next tensors of the expected version, each once, and prefill waiting requests.

        Raises EngineError as `load_weights` does."""
        ...

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs at temperature 1 of tokens 1..L-1 of each sequence.

        Running sequences are not affected. EngineError as for `step`: log-probs that are not finite
        are never returned.
        """
        ...

    def get_stats(self) -> EngineStats:
        """Return a cheap snapshot."""
        ...

    def close(self) -> None:
        """Drop all requests and release the engine's resources."""
        ...
