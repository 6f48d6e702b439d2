"""What a rollout replica asks of a generation engine, whichever engine it is.

Reads   GenerateRequest: ids in, sampling settings, what an earlier attempt already generated
Gives   TokenDelta per sequence and step, EngineStats; EngineError for what an engine refuses

An engine is driven from one thread and does nothing by itself: `step` is one decode step over all
running sequences. The caller thus decides between any two steps whether to add, abort or change
the weights, and no engine needs a lock. Ids in, ids out: an engine never sees text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

STOP = "stop"  #: finish reason: the last token is one of the request's stop ids
LENGTH = "length"  #: finish reason: max_new_tokens were generated


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
    token_ids: list[int]
    logprobs: list[float]  #: of the distribution sampled from, temperature included; at most 0
    finish_reason: str | None  #: None, STOP or LENGTH; nothing follows a reason


@dataclass(frozen=True, slots=True)
class EngineStats:
    kv_used_tokens: int  #: tokens of the running sequences
    kv_capacity_tokens: int
    running: int
    waiting: int  #: added and not yet admitted to a slot


class Engine(Protocol):
    """A generation engine; every method is called from the same thread."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; EngineError when it can never run (too long, unknown ids, ...)."""
        ...

    def abort(self, request_id: str) -> bool:
        """Forget a request; False when it is unknown or finished. No delta of it follows."""
        ...

    def step(self) -> list[TokenDelta]:
        """Admit what waits, then one decode step; [] when there is nothing to do.

        EngineError when work waits and no weights are loaded, or the log-probs are not finite;
        in the second case all requests are dropped.
        """
        ...

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by copies of `tensors` (Hugging Face names).

        EngineError while a sequence runs, and for a tensor that is unknown, missing, given twice
        or of another shape; after a failed load the engine has no weights.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of tokens 1..L-1 of each sequence; only while idle.

        EngineError for what `step` raises too: log-probs that are not finite are never returned.
        """
        ...

    def stats(self) -> EngineStats:
        """A cheap snapshot."""
        ...

    def close(self) -> None:
        """Drop all requests and release what the engine holds."""
        ...
