"""Reads and writes of single rows: the only module that knows both columns and files.

Reads   and writes the tables of `schema` and the payload files, inside the caller's transaction
Raises  DamageError for a payload file that is missing or changed

The store and the audit share these reads, so that the audit checks what the store serves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from laminar.storage import payload_files
from laminar.storage.messages import Extras
from laminar.storage.rows import PayloadRemoved, PromptKey
from laminar.storage.rules import TOKEN_BYTES, Chunk, Row, Source, TokenSpan
from laminar.storage.schema import PAYLOAD_KEPT, PAYLOAD_STEP, ROW_COLUMNS
from laminar.storage.turn_tables import TurnTables

_INSERT_ROW = (
    f"INSERT INTO trajectories ({ROW_COLUMNS}) VALUES ({', '.join('?' * len(Row._fields))})"
)


class _PromptIds(msgspec.Struct, frozen=True):
    """The field of a PromptPayload that dispatch needs; the decoder skips the others."""

    prompt_ids: bytes = b""


_prompt_ids = msgspec.msgpack.Decoder(_PromptIds)


class StoredChunk(NamedTuple):
    """A row of `chunks`; the payload is in two blobs or in a file (tokens, then log-probs)."""

    trajectory_id: str
    attempt: int
    segment: int
    offset: int
    placement: int
    num_tokens: int
    tokens: bytes | None
    logprobs: bytes | None
    file: str | None
    replica: str
    weight_version: int
    version_step: int
    read: str  #: see Chunk

    @property
    def removed(self) -> bool:
        """Whether the payload's bytes have been removed."""
        return self.tokens is None and self.file is None

    @property
    def source(self) -> Source:
        return Source(self.replica, self.weight_version, self.version_step)


_INSERT_CHUNK = f"INSERT INTO chunks VALUES ({', '.join('?' * len(StoredChunk._fields))})"

ALL = 1 << 62  #: above every rowid and every number of rows


class TrajectoryFilter(NamedTuple):
    """A filter of trajectories: one SQL condition on the row."""

    condition: str
    values: tuple[str | int, ...] = ()

    @classmethod
    def trained_by(cls, step: int) -> TrajectoryFilter:
        """Select the trajectories that the batch with this index, from 0, has trained."""
        return cls("\"end\" = 'trained' AND end_step = ?", (step,))

    @classmethod
    def evaluated_after(cls, step: int) -> TrajectoryFilter:
        """Select complete evaluation samples of the weights after this many steps."""
        return cls(
            "purpose = 'eval' AND status != 'open' AND COALESCE(version_step, end_step) = ?",
            (step,),
        )

    @classmethod
    def finished_for(cls, purpose: str) -> TrajectoryFilter:
        return cls("purpose = ? AND status != 'open'", (purpose,))

    @classmethod
    def with_name(cls, name: str) -> TrajectoryFilter:
        """Select one trajectory, or all of a group, in any state."""
        return cls("id = ? OR group_id = ?", (name, name))


class Tables:
    """The rows of one open database."""

    def __init__(self, connection: sqlite3.Connection, folder: Path | None) -> None:
        """Read and write through `connection`; `folder` of payload files, None: all are inline."""
        self._db = connection
        self._folder = folder
        self.turns = TurnTables(connection)
        self.unnamed: set[str] = set()  #: files of removed payloads that may still exist

    def get_meta(self) -> dict[str, str]:
        """Return the facts about the whole store, by the keys of `schema.META`."""
        return dict(self._db.execute("SELECT key, value FROM meta"))

    def set_meta(self, values: dict[str, str]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def add_prompts(self, purpose: str, payloads: Iterable[bytes]) -> None:
        rows = ((purpose, index, payload) for index, payload in enumerate(payloads))
        self._db.executemany("INSERT INTO prompts VALUES (?, ?, ?)", rows)

    def get_prompt(self, key: PromptKey) -> bytes | None:
        """Return the payload, for `messages.decode_prompt`."""
        sql = "SELECT payload FROM prompts WHERE purpose = ? AND row_index = ?"
        found = self._db.execute(sql, key).fetchone()
        return None if found is None else found[0]

    def get_prompt_ids(self, key: PromptKey, payload: bytes) -> bytes:
        """Return the token ids of the prompt with this payload; empty if not tokenised yet."""
        if ids := _prompt_ids.decode(payload).prompt_ids:
            return ids
        sql = "SELECT ids FROM prompt_ids WHERE purpose = ? AND row_index = ?"
        found = self._db.execute(sql, key).fetchone()
        return b"" if found is None else bytes(found[0])

    def add_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        rows = ((*key, found, xxhash.xxh3_128_hexdigest(found)) for key, found in ids.items())
        self._db.executemany("INSERT OR REPLACE INTO prompt_ids VALUES (?, ?, ?, ?)", rows)

    def damaged_prompt_ids(self) -> list[PromptKey]:
        """Return the prompts whose ids do not match their digest, or that have no row."""
        sql = (
            "SELECT i.purpose, i.row_index, i.ids, i.digest, p.payload IS NULL FROM prompt_ids i "
            "LEFT JOIN prompts p USING (purpose, row_index) ORDER BY 1, 2"
        )
        return [
            PromptKey(purpose, row_index)
            for purpose, row_index, ids, digest, alone in self._db.execute(sql)
            if alone or xxhash.xxh3_128_hexdigest(ids) != digest
        ]

    def prompts_digest(self) -> str:
        """Return the xxh3_128 (hex) of all prompt rows in key order, framed by key and length."""
        state = xxhash.xxh3_128()
        sql = "SELECT purpose, row_index, payload FROM prompts ORDER BY purpose, row_index"
        for purpose, row_index, payload in self._db.execute(sql):
            state.update(f"{purpose} {row_index} {len(payload)}\n".encode())
            state.update(payload)
        return state.hexdigest()

    def get_row(self, trajectory_id: str) -> Row | None:
        sql = f"SELECT {ROW_COLUMNS} FROM trajectories WHERE id = ?"
        found = self._db.execute(sql, (trajectory_id,)).fetchone()
        return None if found is None else Row._make(found)

    def iter_rows(self) -> Iterator[Row]:
        sql = f"SELECT {ROW_COLUMNS} FROM trajectories ORDER BY id"
        return map(Row._make, self._db.execute(sql))

    def iter_placements(self) -> Iterator[tuple[str, int, str | None]]:
        """Iterate (id, placement, end) over all trajectories, in the order of opening."""
        return iter(self._db.execute('SELECT id, placement, "end" FROM trajectories'))

    def find_newest(
        self, wanted: TrajectoryFilter, before: int = ALL, limit: int = ALL
    ) -> list[tuple[int, Row]]:
        """Return (rowid, row) of rows below `before`, the most recently opened first."""
        sql = (
            f"SELECT rowid, {ROW_COLUMNS} FROM trajectories WHERE ({wanted.condition}) "
            "AND rowid < ? ORDER BY rowid DESC LIMIT ?"
        )
        found = self._db.execute(sql, (*wanted.values, before, limit))
        return [(place, Row._make(row)) for place, *row in found]

    def trained_steps(self) -> list[int]:
        """Return the indices of the batches that trained something, from 0, in order."""
        sql = "SELECT DISTINCT end_step FROM trajectories WHERE \"end\" = 'trained' ORDER BY 1"
        return [step for (step,) in self._db.execute(sql)]

    def evaluated_steps(self) -> list[int]:
        """Return the completed steps of the weights of each evaluation, in order."""
        sql = (
            "SELECT DISTINCT COALESCE(version_step, end_step) FROM trajectories "
            "WHERE purpose = 'eval' AND status != 'open' ORDER BY 1"
        )
        return [step for (step,) in self._db.execute(sql)]

    def save(self, before: Row | None, after: Row) -> None:
        """Insert the row, or update the columns that changed: an append changes three of them."""
        if before is None:
            self._db.execute(_INSERT_ROW, after)
            return
        old, new = before._asdict(), after._asdict()
        changed = {name: new[name] for name in new if new[name] != old[name]}
        columns = ", ".join(f'"{name}" = ?' for name in changed)
        sql = f"UPDATE trajectories SET {columns} WHERE id = ?"
        self._db.execute(sql, (*changed.values(), after.id))

    def set_reward_text(
        self, trajectory_id: str, score: float | None, text: str | None, extras: Extras
    ) -> None:
        """Set the human-readable columns: reward as a number, response text, extras."""
        sql = "UPDATE trajectories SET reward = ?, text = ?, extras = ? WHERE id = ?"
        encoded = msgspec.json.encode(extras).decode() if extras else None
        self._db.execute(sql, (score, text, encoded, trajectory_id))

    def get_extras(self, trajectory_id: str) -> Extras:
        """Return the further values of its reward function."""
        sql = "SELECT extras FROM trajectories WHERE id = ?"
        found = self._db.execute(sql, (trajectory_id,)).fetchone()
        return msgspec.json.decode(found[0], type=Extras) if found and found[0] else {}

    def add_chunk(self, row: Row, chunk: Chunk) -> None:
        """Store a chunk of the row's attempt; a large one becomes a durable file before its row."""
        tokens: bytes | None = chunk.tokens
        logprobs: bytes | None = chunk.logprobs
        file = None
        size = len(chunk.tokens) + len(chunk.logprobs)
        if self._folder is not None and size > payload_files.INLINE_LIMIT:
            file = payload_files.write(self._folder, chunk.tokens + chunk.logprobs)
            tokens = logprobs = None
        count = len(chunk.tokens) // TOKEN_BYTES
        key = (row.id, row.attempt, chunk.segment, chunk.offset)
        payload = tokens, logprobs, file
        values = StoredChunk(*key, row.placement, count, *payload, *chunk.source, chunk.read)
        self._db.execute(_INSERT_CHUNK, values)

    def drop_chunks(self, trajectory_id: str) -> None:
        """Delete all chunks and contexts; their files are removed at the next start."""
        self._db.execute("DELETE FROM chunks WHERE trajectory_id = ?", (trajectory_id,))
        self.turns.drop_contexts(trajectory_id)

    def stored_chunks(self, trajectory_id: str) -> list[StoredChunk]:
        """Return the chunks of a trajectory in order, without the content of files."""
        sql = 'SELECT * FROM chunks WHERE trajectory_id = ? ORDER BY attempt, segment, "offset"'
        return [StoredChunk(*found) for found in self._db.execute(sql, (trajectory_id,))]

    def load_chunk_at(self, row: Row, segment: int, offset: int) -> Chunk | None:
        """Return the chunk of the attempt at exactly this offset, unless removed; DamageError."""
        sql = (
            "SELECT * FROM chunks WHERE trajectory_id = ? AND attempt = ? AND segment = ? "
            'AND "offset" = ?'
        )
        found = self._db.execute(sql, (row.id, row.attempt, segment, offset)).fetchone()
        stored = None if found is None else StoredChunk(*found)
        return None if stored is None or stored.removed else self.load_chunk(stored)

    def get_spans(self, row: Row) -> tuple[TokenSpan, ...]:
        """Return the row's spans, like `rules.compute_spans`, also of a removed payload."""
        parts = groupby(self.stored_chunks(row.id), lambda chunk: chunk.source)
        return tuple(
            TokenSpan._make((*who, sum(c.num_tokens for c in part))) for who, part in parts
        )

    def load_chunks(self, trajectory_id: str) -> list[Chunk]:
        """Return all chunks in order; DamageError, PayloadRemoved."""
        return [self.load_chunk(stored) for stored in self.stored_chunks(trajectory_id)]

    def load_chunk(self, stored: StoredChunk) -> Chunk:
        """Return the chunk with its bytes, from the row or from its file."""
        if stored.removed:
            raise PayloadRemoved(f"the tokens of {stored.trajectory_id} are no longer in the store")
        tokens, logprobs = stored.tokens or b"", stored.logprobs or b""
        if stored.file is not None:
            assert self._folder is not None, "only a file names a folder"
            data = payload_files.read(self._folder, stored.file)
            half = len(data) // 2
            tokens, logprobs = data[:half], data[half:]
        source, read = stored.source, stored.read
        return Chunk(stored.segment, stored.offset, tokens, logprobs, source, read)

    def file_names(self) -> set[str]:
        """Return the payload files that chunks name."""
        sql = "SELECT file FROM chunks WHERE file IS NOT NULL"
        return {name for (name,) in self._db.execute(sql)}

    # --- removal of payloads ------------------------------------------------------------------

    def find_removable(self, before_step: int, keep_tokens: int, most: int) -> list[str]:
        """Return the oldest payloads that `messages.RemovePayloads` may remove."""
        kept = self._db.execute(f"SELECT SUM(num_tokens) FROM trajectories WHERE {PAYLOAD_KEPT}")
        beyond = (kept.fetchone()[0] or 0) - keep_tokens
        if beyond <= 0:
            return []
        sql = (
            f"SELECT id, num_tokens FROM trajectories WHERE {PAYLOAD_KEPT} "
            f"AND num_tokens > 0 AND {PAYLOAD_STEP} < ? ORDER BY {PAYLOAD_STEP}, rowid LIMIT ?"
        )
        found = []
        for trajectory_id, num_tokens in self._db.execute(sql, (before_step, most)):
            if beyond <= 0:
                break
            found.append(trajectory_id)
            beyond -= num_tokens
        return found

    def remove_payload(self, trajectory_id: str) -> None:
        """Delete tokens and log-probs, but keep the row and the sources.

        Files are unlinked after the commit (database.py).
        """
        files = "SELECT file FROM chunks WHERE trajectory_id = ? AND file IS NOT NULL"
        self.unnamed |= {name for (name,) in self._db.execute(files, (trajectory_id,))}
        sql = (
            "UPDATE chunks SET tokens = NULL, logprobs = NULL, file = NULL WHERE trajectory_id = ?"
        )
        self._db.execute(sql, (trajectory_id,))
        self._db.execute(
            "UPDATE contexts SET tokens = NULL WHERE trajectory_id = ?", (trajectory_id,)
        )
        sql = "UPDATE trajectories SET payload_removed = 1 WHERE id = ?"
        self._db.execute(sql, (trajectory_id,))

    def is_removed(self, trajectory_id: str) -> bool:
        """Return whether its tokens were removed from all of its chunks."""
        found = self.stored_chunks(trajectory_id)
        return bool(found) and all(chunk.removed for chunk in found)

    def removed_payloads(self) -> set[str]:
        """Return the trajectories with a removed payload."""
        sql = "SELECT id FROM trajectories WHERE payload_removed = 1"
        return {name for (name,) in self._db.execute(sql)}

    def is_named(self, file: str) -> bool:
        """Return whether a chunk names this payload file."""
        sql = "SELECT 1 FROM chunks WHERE file = ? LIMIT 1"
        return self._db.execute(sql, (file,)).fetchone() is not None

    def get_text(self, trajectory_id: str) -> str:
        """Return the response as the reward function saw it; empty if it was not scored."""
        sql = "SELECT text FROM trajectories WHERE id = ?"
        found = self._db.execute(sql, (trajectory_id,)).fetchone()
        return (found[0] or "") if found else ""

    def get_totals(self) -> list[tuple[str, int, int, int]]:
        """Return (end, or else status; trajectories; tokens; tokens lost), sorted by name."""
        sql = (
            'SELECT COALESCE("end", status), COUNT(*), SUM(num_tokens), SUM(tokens_lost) '
            "FROM trajectories GROUP BY 1 ORDER BY 1"
        )
        return self._db.execute(sql).fetchall()

    def database_bytes(self) -> int:
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (page_size,) = self._db.execute("PRAGMA page_size").fetchone()
        return int(pages * page_size)

    def prompt_rows(self, purpose: str) -> int:
        sql = "SELECT COUNT(*) FROM prompts WHERE purpose = ?"
        return int(self._db.execute(sql, (purpose,)).fetchone()[0])

    def orphan_chunks(self) -> list[tuple[str, int]]:
        """Return (trajectory id, chunks) of chunks whose trajectory has no row."""
        sql = (
            "SELECT trajectory_id, COUNT(*) FROM chunks WHERE trajectory_id NOT IN "
            "(SELECT id FROM trajectories) GROUP BY trajectory_id ORDER BY trajectory_id"
        )
        return self._db.execute(sql).fetchall()

    def sqlite_problems(self) -> list[str]:
        """Return the problems that SQLite itself finds in the file."""
        found = [line for (line,) in self._db.execute("PRAGMA integrity_check")]
        return [] if found == ["ok"] else [f"SQLite: {line}" for line in found]
