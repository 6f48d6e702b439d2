"""What a learner is handed of a batch, as one digest.

Reads   samples as plain bytes and numbers: the trainer's are those that it hands to its learner,
        an audit's those that it works out from the rows of the store
Gives   Content, digest_of

Of both the same digest means that the learner had what the engines made: tokens and log-probs, who
sampled which part of them with which weights, the reward of each sibling, and whether the response
was cut off. It takes no part in how a batch is put together, so a mistake there cannot hide in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import xxhash

from laminar.storage.rules import Span


class Content(NamedTuple):
    """One sample."""

    trajectory_id: str
    group_id: str
    prompt_ids: bytes  #: int32 little-endian, as are
    tokens: bytes  #: of the response, the token that ended it included
    logprobs: bytes  #: float32 little-endian, one to each token
    reward: float
    temperature: float
    truncated: bool  #: the engine stopped it at the longest response
    spans: tuple[Span, ...]
    turns: tuple[int, ...] = ()  #: tokens of each, if there are several
    contexts: tuple[bytes, ...] = ()  #: what was read between two of them


_encode = msgspec.msgpack.Encoder().encode


def digest_batch(batch: Iterable[Content]) -> str:
    """xxh3_128 (hex) of the MessagePack arrays of the samples, in the order of the batch."""
    state = xxhash.xxh3_128()
    for content in batch:
        state.update(_encode(content))
    return state.hexdigest()
