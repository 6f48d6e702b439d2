"""Types and errors that describe the rows of the store.

Gives   PromptKey, PromptCount, LoadedPrompts; DamageError, PayloadRemoved, NotTokenised
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from laminar.storage.messages import PromptPayload


class PromptKey(NamedTuple):
    """The key of a prompt: its index within its purpose, from 0."""

    purpose: str
    row_index: int


class PromptCount(NamedTuple):
    """The number of rows per purpose and the digest of the data ("" before it is stored)."""

    train: int
    held_out: int
    digest: str


class LoadedPrompts(NamedTuple):
    """The rows that a run uses, each at its index; token ids may be missing."""

    train: Sequence[PromptPayload]
    held_out: Sequence[PromptPayload]
    overlap: int  #: rows excluded from training because their prompt is held out
    digest: str  #: digest of all rows as read


class DamageError(Exception):
    """Stored data is missing or has changed."""


class PayloadRemoved(DamageError):
    """Tokens and log-probs were removed by `messages.RemovePayloads`."""


class NotTokenised(Exception):
    """These prompts have no token ids yet; retry the request once they have."""

    def __init__(self, prompts: Mapping[PromptKey, bytes]) -> None:
        """Keep the payloads of the prompts that have to be tokenised."""
        super().__init__(prompts)
        self.prompts = prompts
