"""What the store says of its rows besides their content.

Gives   PromptKey, PromptCount, LoadedPrompts, Response; DamageError, PayloadRemoved, NotTokenised
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from laminar.storage.messages import PromptPayload


class PromptKey(NamedTuple):
    """Which prompt: its place within its purpose, from 0."""

    purpose: str
    row_index: int


class PromptCount(NamedTuple):
    """Rows per purpose and the digest they were stored with ("" before it)."""

    train: int
    held_out: int
    digest: str


class LoadedPrompts(NamedTuple):
    """The rows that a run uses, each at its place; they may have no token ids yet."""

    train: Sequence[PromptPayload]
    held_out: Sequence[PromptPayload]
    overlap: int  #: rows left out of training because their prompt is held out
    digest: str  #: of all rows as they were read


class Response(NamedTuple):
    """How long a response was, and what became of it."""

    num_tokens: int
    score: float | None
    version_step: int  #: completed steps whose weights sampled it
    trained: int | None  #: 1 when it was
    end_step: int | None  #: then the index of the batch, from 0


class DamageError(Exception):
    """Something that was stored is missing, or is not what was stored."""


class PayloadRemoved(DamageError):
    """Tokens and log-probs went as `messages.RemovePayloads` says."""


class NotTokenised(Exception):
    """These prompts have no token ids yet; the request can be handled when they have."""

    def __init__(self, prompts: Mapping[PromptKey, bytes]) -> None:
        """`prompts`: their payloads."""
        super().__init__(prompts)
        self.prompts = prompts
