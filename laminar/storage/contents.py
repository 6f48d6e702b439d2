"""A digest of the content of a batch, as the learner receives it.

Reads   samples as plain bytes and numbers: the trainer's are those it hands to its learner, an
        audit's are computed from the rows of the store
Gives   Content, digest_batch

Equal digests of both prove that the learner received what the engines made: tokens and log-probs,
the replica and weights that sampled each part, the reward of each sibling, and whether the response
was cut off. Batches are assembled without this module, so a mistake there cannot hide in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import xxhash

from laminar.storage.rules import TokenSpan


class Content(NamedTuple):
    """A sample."""

    trajectory_id: str
    group_id: str
    prompt_ids: bytes  #: int32 little-endian, like `tokens`
    tokens: bytes  #: response tokens, including the one that ended it
    logprobs: bytes  #: float32 little-endian, one per token
    reward: float
    temperature: float
    truncated: bool  #: the engine stopped it at the maximum response length
    spans: tuple[TokenSpan, ...]
    turns: tuple[int, ...] = ()  #: tokens of each turn, if there are several
    contexts: tuple[bytes, ...] = ()  #: tokens read before each turn but the first
    parents: tuple[int, ...] = ()  #: turn that each turn follows, if there are branches


_encode = msgspec.msgpack.Encoder().encode


def digest_batch(batch: Iterable[Content]) -> str:
    """Return the xxh3_128 (hex) of the samples' MessagePack arrays, in the order of the batch."""
    state = xxhash.xxh3_128()
    for content in batch:
        state.update(_encode(content if content.parents else content[:-1]))
    return state.hexdigest()
