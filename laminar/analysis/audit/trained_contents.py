"""Audit of the contents of each trained batch against the store.

Reads   the lines of the trainer's book; rows, chunks and prompts of the store
Gives   content_problems, and a note of the batches that cannot be checked, one sentence each

The contents are rebuilt from the rows as the replicas wrote them, by code that the trainer does not
use: its batches come with the replies of the store (storage/handlers.py, batch_fetch.py).
"""

from __future__ import annotations

import sqlite3
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar.analysis.audit.trainer_book import BookLine
from laminar.analysis.log.display import step_number
from laminar.config import ConfigError
from laminar.run.directory import STORE_FILE, TRAINER_BOOK_FILE
from laminar.storage import books
from laminar.storage.contents import Content, digest_batch
from laminar.storage.rows import DamageError, PromptKey
from laminar.storage.rules import TokenSpan
from laminar.storage.tables import StoredChunk, Tables

STOPPED = "stop"
"""Finish reason of a response that the model ended; with any other it was truncated."""


class _MissingContent(Exception):
    """Raised when the store no longer has all of a row."""


def content_problems(run_dir: Path, lines: Sequence[BookLine]) -> tuple[list[str], list[str]]:
    """Return problems and notes; none if the store is unreadable, which other checks report."""
    problems, unknown = [], 0
    try:
        with books.open_tables(run_dir / STORE_FILE) as tables:
            for line in lines:
                try:
                    found = digest_batch(_build_content(tables, name) for name in line.ids)
                except (_MissingContent, DamageError, msgspec.MsgspecError, struct.error):
                    unknown += 1  # damage is reported by other checks
                    continue
                if not line.contents:
                    unknown += 1
                elif found != line.contents:
                    problems.append(_format_difference(line))
    except (ConfigError, sqlite3.Error):
        return [], []
    notes = [
        f"the trainer's input for {unknown} of {len(lines)} batches cannot be checked: the store "
        "no longer has all of its tokens"
    ]
    return problems, notes if unknown else []


def _format_difference(line: BookLine) -> str:
    return (
        f"trainer: step {step_number(line.step)} was trained on contents that differ from the "
        f"store ({TRAINER_BOOK_FILE}, version {line.version}): tokens, log-probs, rewards, "
        "truncation or weight versions"
    )


def _build_content(tables: Tables, trajectory_id: str) -> Content:
    """Rebuild a response as its replicas stored it."""
    row = tables.get_row(trajectory_id)
    if row is None or row.reward_bits is None or row.temperature is None:
        raise _MissingContent
    key = PromptKey(row.purpose, row.row_index)
    chunks = [c for c in tables.stored_chunks(row.id) if c.attempt == row.attempt]
    loaded = [tables.load_chunk(chunk) for chunk in chunks]
    (reward,) = struct.unpack("<d", row.reward_bits)
    contexts = tables.turns.get_contexts(row)
    return Content(
        trajectory_id=row.id,
        group_id=row.group_id,
        prompt_ids=contexts.pop(0, b"")
        or tables.get_prompt_ids(key, tables.get_prompt(key) or b""),
        tokens=b"".join(chunk.tokens for chunk in loaded),
        logprobs=b"".join(chunk.logprobs for chunk in loaded),
        reward=reward,
        temperature=row.temperature,
        truncated=row.finish_reason not in (None, STOPPED),
        spans=_merge_spans(chunks),
        turns=_count_turn_tokens(chunks) if contexts else (),
        contexts=tuple(contexts.values()),
        parents=tables.turns.get_parents(row),
    )


def _count_turn_tokens(chunks: Sequence[StoredChunk]) -> tuple[int, ...]:
    """Return the number of sampled tokens of each turn."""
    counts = Counter[int]()
    for chunk in chunks:
        counts[chunk.segment] += chunk.num_tokens
    return tuple(counts[segment] for segment in sorted(counts))


def _merge_spans(chunks: Sequence[StoredChunk]) -> tuple[TokenSpan, ...]:
    """Merge neighbouring chunks of the same source into one span."""
    spans: list[TokenSpan] = []
    for chunk in chunks:
        if chunk.source is None:
            raise _MissingContent
        if spans and spans[-1][:3] == tuple(chunk.source):
            spans[-1] = spans[-1]._replace(num_tokens=spans[-1].num_tokens + chunk.num_tokens)
        else:
            spans.append(TokenSpan(*chunk.source, chunk.num_tokens))
    return tuple(spans)
