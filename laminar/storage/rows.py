"""What the handlers of requests need of the rows of a store, wherever they lie.

Gives   Rows (tables.py has them in SQLite); what they say of prompts; DamageError, PayloadRemoved,
        NotTokenised
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from laminar.storage.messages import Extras, PromptPayload
from laminar.storage.rules import Chunk, Row


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


class Rows(Protocol):
    """The rows and chunks of trajectories, the prompts, and what is known of all together."""

    def meta(self) -> dict[str, str]:
        """Facts of the whole store, by the keys of `schema.META`."""

    def prompt(self, key: PromptKey) -> bytes | None:
        """The payload, for `messages.decode_prompt`."""

    def prompt_ids(self, key: PromptKey, payload: bytes) -> bytes:
        """Token ids of the prompt with this payload; empty when it has not been tokenised yet."""

    def row(self, trajectory_id: str) -> Row | None: ...

    def save(self, before: Row | None, after: Row) -> None:
        """Put `after` in the place of `before`; None: there was no row."""

    def set_reward_text(
        self, trajectory_id: str, score: float | None, text: str | None, extras: Extras
    ) -> None:
        """What is kept of a reward for people."""

    def extras(self, trajectory_id: str) -> Extras:
        """What its reward function gave besides the score."""

    def add_chunk(self, row: Row, chunk: Chunk) -> None:
        """Store a chunk of the row's attempt; its source is that of the row as it is now."""

    def drop_chunks(self, trajectory_id: str) -> None:
        """Forget all chunks."""

    def chunk(self, row: Row, segment: int, offset: int) -> Chunk | None:
        """The chunk of the row's attempt that starts at this very offset, unless its payload was
        removed; DamageError."""

    def chunks(self, trajectory_id: str) -> list[Chunk]:
        """All chunks, in order; DamageError, PayloadRemoved."""

    def removable(self, before_step: int, keep_tokens: int, most: int) -> list[str]:
        """The oldest payloads of those that `messages.RemovePayloads` speaks of."""

    def remove_payload(self, trajectory_id: str) -> None:
        """Forget tokens and log-probs, and what of them can be sent again; the row stays, with who
        sampled how many of them."""

    def totals(self) -> list[tuple[str, int, int, int]]:
        """(end, or status of what has none; trajectories; tokens; tokens lost), by name."""

    def database_bytes(self) -> int:
        """How large the store is."""
