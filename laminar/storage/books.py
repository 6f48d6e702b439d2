"""Read-only checks of a store database, for an audit during or after a run.

Reads   store.sqlite and its payload files, in one read transaction; changes nothing
Gives   the rows, and lists of problems, one sentence each; an empty list means no problem
Raises  ConfigError if the file is missing or not a store database

`check_integrity` needs only the file: every count and digest in it must agree with the data. It
cannot know which trajectories should exist; for that the audit compares the rows with another
process's record, the event log. Together they detect the loss of any single row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import xxhash

from laminar.config import ConfigError
from laminar.storage import payload_files, rules, schema
from laminar.storage.branches import ROOT, Parents
from laminar.storage.rows import DamageError, PromptKey
from laminar.storage.rules import TOKEN_BYTES, Chunk, Row
from laminar.storage.tables import StoredChunk, Tables


@contextmanager
def open_tables(path: Path) -> Iterator[Tables]:
    """Open the tables as of now; a store that still writes does not change what is read."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name the store.sqlite of a run directory")
    with _connect_readonly(path) as db:
        yield Tables(db, payload_files.folder_of(path))


def check_integrity(path: Path) -> list[str]:
    """Return the contradictions in a database and its files."""
    with open_tables(path) as tables:
        return find_contradictions(tables)


def find_contradictions(tables: Tables) -> list[str]:
    """Return the contradictions in open tables."""
    problems = tables.sqlite_problems() + _meta_problems(tables)
    removed = tables.removed_payloads()
    for row in tables.iter_rows():
        problems += _trajectory_problems(tables, row, row.id in removed)
    orphans = tables.orphan_chunks()
    problems += [f"{number} chunks of {name} have no row" for name, number in orphans]
    endless = tables.turns.endless_effects()
    return problems + [
        f"{number} calls of {name} have no end, but the trajectory has" for name, number in endless
    ]


def _meta_problems(tables: Tables) -> list[str]:
    meta = tables.get_meta()
    missing = [f"meta key {key!r} is missing" for key in schema.META if key not in meta]
    if missing:
        return missing
    problems = []
    for purpose in ("train", "eval"):
        stored, counted = tables.prompt_rows(purpose), meta[f"{purpose}_prompts"]
        if str(stored) != counted:
            problems.append(f"{stored} {purpose} prompts are stored, {counted} were loaded")
    if meta["data_digest"] and tables.prompts_digest() != meta["prompts_digest"]:
        problems.append("the prompt rows do not match the digest they were loaded with")
    return problems + [
        f"the token ids of {purpose} prompt {row_index} do not match their digest"
        for purpose, row_index in tables.damaged_prompt_ids()
    ]


def _trajectory_problems(tables: Tables, row: Row, removed: bool) -> list[str]:
    """Check that chunks are consecutive, belong to the attempt and add up to the row."""
    chunks = tables.stored_chunks(row.id)
    problems = _order_problems(row, chunks) + _source_problems(row, chunks)
    problems += _reward_problems(row) + _prompt_problems(tables, row)
    if removed:
        return problems + _removed_problems(row, chunks)
    tokens = logprobs = b""
    contexts: dict[int, bytes] = {}
    parents = tables.turns.get_parents(row)
    try:
        loaded, contexts = (
            [tables.load_chunk(chunk) for chunk in chunks],
            tables.turns.get_contexts(row),
        )
        tokens = b"".join(chunk.tokens for chunk in loaded)
        logprobs = b"".join(chunk.logprobs for chunk in loaded)
    except DamageError as error:
        return [*problems, f"trajectory {row.id}: {error}"]
    sizes = {len(tokens), len(logprobs), row.num_tokens * TOKEN_BYTES}
    if len(sizes) != 1:
        problems.append(
            f"trajectory {row.id} counts {row.num_tokens} tokens, its chunks hold "
            f"{len(tokens)} bytes of tokens and {len(logprobs)} of log-probs"
        )
    digest = rules.digest_payload(tokens, logprobs, list(contexts.values()), parents)
    if row.status != "open" and row.digest != digest:
        problems.append(f"trajectory {row.id} does not match its digest {row.digest}")
    problems += _context_problems(row, contexts, parents)
    return problems + _read_problems(row, loaded, contexts, parents, _prompt_ids(tables, row))


def _context_problems(row: Row, contexts: dict[int, bytes], parents: Parents) -> list[str]:
    """Check that each answered turn is followed by one context and misses no sampled token."""
    problems, count = [], sum(map(len, contexts.values())) // TOKEN_BYTES
    behind = [turn for turn in contexts if turn]
    if count != row.context_tokens or behind != list(range(1, row.turns + 1)):
        problems.append(
            f"trajectory {row.id} counts {row.context_tokens} context tokens after {row.turns} "
            f"turns, and has {count} before turns {list(contexts)}"
        )
    if row.segments not in (row.turns, row.turns + 1):
        problems.append(
            f"trajectory {row.id} has tokens of {row.segments} turns, {row.turns} of them answered"
        )
    return problems + [
        f"trajectory {row.id} has a turn {turn} that follows turn {parent}"
        for turn, parent in enumerate(parents)
        if not ROOT <= parent < turn
    ]


def _read_problems(
    row: Row, chunks: list[Chunk], contexts: dict[int, bytes], parents: Parents, prompt_ids: bytes
) -> list[str]:
    """Check that each engine began with exactly the prompt and all earlier tokens of its path."""
    problems, contexts = [], {0: prompt_ids} | contexts
    after = {ROOT: xxhash.xxh3_128()}  #: state after all tokens that end with this turn
    for chunk in chunks:
        turn = chunk.segment
        if turn not in after:
            parent = parents[turn] if turn < len(parents) else turn - 1
            after[turn] = after.get(parent, after[ROOT]).copy()
            after[turn].update(contexts.get(turn, b""))
        if chunk.read and chunk.read != after[turn].hexdigest():
            problems.append(
                f"trajectory {row.id} was sampled at segment {turn} offset {chunk.offset} after "
                "other tokens than the stored ones"
            )
        after[turn].update(chunk.tokens)
    return problems


def _removed_problems(row: Row, chunks: list[StoredChunk]) -> list[str]:
    """Check that a removed payload has kept its counts, and that the trajectory has ended."""
    problems = []
    counted = sum(chunk.num_tokens for chunk in chunks)
    if counted != row.num_tokens:
        problems.append(
            f"trajectory {row.id} counts {row.num_tokens} tokens, its chunks had {counted}"
        )
    if row.end is None:
        problems.append(f"the payload of trajectory {row.id} was removed before its end")
    if not all(chunk.removed for chunk in chunks):
        problems.append(f"the payload of trajectory {row.id} was removed, but a part remains")
    return problems


def _order_problems(row: Row, chunks: list[StoredChunk]) -> list[str]:
    problems = []
    segment, offset = -1, 0
    for chunk in chunks:
        if chunk.segment == segment + 1:
            segment, offset = segment + 1, 0
        if (chunk.attempt, chunk.segment, chunk.offset) != (row.attempt, segment, offset):
            problems.append(
                f"trajectory {row.id} has a chunk at attempt {chunk.attempt} segment "
                f"{chunk.segment} offset {chunk.offset} instead of attempt {row.attempt} "
                f"segment {segment} offset {offset}"
            )
        offset = chunk.offset + chunk.num_tokens
    if (row.segments, row.segment_tokens) != (segment + 1, offset):
        problems.append(
            f"trajectory {row.id} counts {row.segments} segments with {row.segment_tokens} tokens "
            f"in the last, its chunks make {segment + 1} with {offset}"
        )
    return problems


def _source_problems(row: Row, chunks: list[StoredChunk]) -> list[str]:
    """Check that a placement has one replica, and that weights never get older."""
    known = [(chunk.placement, source) for chunk in chunks if (source := chunk.source)]
    if not known:
        return []
    problems, versions = [], [(source.weight_version, source.version_step) for _, source in known]
    if (first := (row.weight_version, row.version_step), row.latest) != (versions[0], versions[-1]):
        problems.append(
            f"trajectory {row.id} has tokens of versions {versions[0]} to {versions[-1]} "
            f"(version, step), but its row has {first} to {row.latest}"
        )
    if any(b < a for i in (0, 1) for a, b in pairwise(v[i] for v in versions)):
        problems.append(
            f"trajectory {row.id} has tokens of older weights after those of newer ones"
        )
    if row.last_version is None and len(set(versions)) > 1:
        problems.append(f"trajectory {row.id} has tokens of several versions, but its row has one")
    if len({(p, s.replica) for p, s in known}) != len({p for p, _ in known}):
        problems.append(f"trajectory {row.id} has several replicas under one placement")
    return problems


def _reward_problems(row: Row) -> list[str]:
    if row.end in ("trained", "evaluated") and row.status != "rewarded":
        return [f"trajectory {row.id} is {row.end} but only {row.status}"]
    return []


def _prompt_problems(tables: Tables, row: Row) -> list[str]:
    """Check that an opened trajectory has the token ids of its prompt."""
    if not row.attempt or _prompt_ids(tables, row):
        return []
    return [f"the {row.purpose} prompt {row.row_index} of trajectory {row.id} has no token ids"]


def _prompt_ids(tables: Tables, row: Row) -> bytes:
    """Return the token ids of the row's prompt; empty if missing."""
    key = PromptKey(row.purpose, row.row_index)
    try:
        return tables.get_prompt_ids(key, tables.get_prompt(key) or b"")
    except msgspec.MsgspecError:
        return b""


@contextmanager
def _connect_readonly(path: Path) -> Iterator[sqlite3.Connection]:
    db = None
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        db.execute("BEGIN")
        db.execute("SELECT 1 FROM meta")
    except sqlite3.DatabaseError as error:
        if db is not None:
            db.close()
        raise ConfigError(
            f"{path} is not a store database ({error}): name a store.sqlite"
        ) from error
    try:
        yield db
    finally:
        db.close()
