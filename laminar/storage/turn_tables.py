"""Reads and writes of what an environment adds to a trajectory: contexts and tool calls.

Reads   and writes the tables `contexts` and `effects` of `schema`, inside the caller's transaction
Gives   TurnTables, a part of Tables; StoredEffect

No other table refers to these two; tables.py knows the columns of all others.
"""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple

import msgspec

from laminar.storage.branches import ROOT, Parents
from laminar.storage.rows import PayloadRemoved
from laminar.storage.rules import TOKEN_BYTES, Row


class StoredEffect(NamedTuple):
    """A tool call: a row of `effects` without its key."""

    owner: str  #: process that makes it; empty: retryable
    call: int
    tool: str
    arguments: str
    status: str
    result: str
    seconds: float = 0.0


class TurnTables:
    """The contexts and effects of one open database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def add_context(
        self,
        trajectory_id: str,
        turn: int,
        tokens: bytes,
        parent: int | None = None,
        options: msgspec.Struct | None = None,
    ) -> None:
        """Add unsampled tokens that the model reads before this turn (0: as its prompt)."""
        stored = msgspec.json.encode(options).decode() if options is not None else None
        values = (trajectory_id, turn, len(tokens) // TOKEN_BYTES, tokens, parent, stored)
        sql = "INSERT INTO contexts (trajectory_id, turn, num_tokens, tokens, parent, options) "
        self._db.execute(f"{sql}VALUES (?, ?, ?, ?, ?, ?)", values)

    def get_options(self, row: Row) -> str:
        """Return the options of the row's newest turn, as JSON."""
        if not row.context_tokens:
            return "{}"
        sql = "SELECT options FROM contexts WHERE trajectory_id = ? AND turn = ?"
        found = self._db.execute(sql, (row.id, row.turns)).fetchone()
        return (found and found[0]) or "{}"

    def get_contexts(self, row: Row) -> dict[int, bytes]:
        """Return the row's contexts by the turn that reads them; PayloadRemoved."""
        if not row.context_tokens:
            return {}
        sql = "SELECT turn, tokens FROM contexts WHERE trajectory_id = ? ORDER BY turn"
        found: dict[int, bytes | None] = dict(self._db.execute(sql, (row.id,)))
        known = {turn: tokens for turn, tokens in found.items() if tokens is not None}
        if len(known) < len(found):
            raise PayloadRemoved(f"the tokens of {row.id} are no longer in the store")
        return known

    def get_parents(self, row: Row) -> Parents:
        """Return the turn that each of the row's turns follows; () if always the one before."""
        if not row.turns:
            return ()
        sql = "SELECT turn, parent FROM contexts WHERE trajectory_id = ? AND parent IS NOT NULL"
        found: dict[int, int] = dict(self._db.execute(sql, (row.id,)))
        parents = (ROOT, *(found.get(turn, turn - 1) for turn in range(1, row.turns + 1)))
        return parents if found else ()

    def drop_contexts(self, trajectory_id: str) -> None:
        """Delete the contexts of an attempt that restarts; its calls are kept."""
        self._db.execute("DELETE FROM contexts WHERE trajectory_id = ?", (trajectory_id,))
        self.lose_effects(trajectory_id)

    def remove_payload(self, trajectory_id: str) -> None:
        """Delete the tokens of the contexts, but keep their number."""
        sql = "UPDATE contexts SET tokens = NULL WHERE trajectory_id = ?"
        self._db.execute(sql, (trajectory_id,))

    def get_effects(self, row: Row, turn: int) -> list[StoredEffect]:
        """Return the calls of one turn of the row's attempt, in order."""
        sql = (
            "SELECT owner, call, tool, arguments, status, result, seconds FROM effects "
            "WHERE trajectory_id = ? AND attempt = ? AND turn = ? ORDER BY call"
        )
        found = self._db.execute(sql, (row.id, row.attempt, turn))
        return [StoredEffect._make(effect) for effect in found]

    def add_effect(self, row: Row, turn: int, effect: StoredEffect) -> None:
        """Record that a call is intended or has ended; its first end is kept."""
        sql = (
            "INSERT INTO effects (trajectory_id, attempt, turn, owner, call, tool, arguments, "
            "status, result, seconds) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET status = excluded.status, result = excluded.result, seconds = excluded.seconds "
            "WHERE status = 'intended'"
        )
        self._db.execute(sql, (row.id, row.attempt, turn, *effect))

    def call_seconds(self, row: Row) -> float:
        """Return the total duration of the calls of all earlier turns of the row's attempt."""
        sql = "SELECT TOTAL(seconds) FROM effects WHERE trajectory_id = ? AND attempt = ? "
        sql += "AND turn < ?"
        found: float = self._db.execute(sql, (row.id, row.attempt, row.turns)).fetchone()[0]
        return found

    def list_calls(self) -> list[tuple[Any, ...]]:
        """Return trajectory, attempt, turn, call, tool, status and seconds of every call."""
        sql = "SELECT trajectory_id, attempt, turn, call, tool, status, seconds FROM effects"
        return self._db.execute(sql).fetchall()

    def lose_effects(self, trajectory_id: str) -> None:
        """Mark calls without an end as lost."""
        sql = "UPDATE effects SET status = 'lost' WHERE trajectory_id = ? AND status = 'intended'"
        self._db.execute(sql, (trajectory_id,))

    def endless_effects(self) -> list[tuple[str, int]]:
        """Return (trajectory id, calls) of calls without an end whose trajectory has ended."""
        sql = (
            "SELECT trajectory_id, COUNT(*) FROM effects WHERE status = 'intended' AND "
            'trajectory_id IN (SELECT id FROM trajectories WHERE "end" IS NOT NULL) '
            "GROUP BY trajectory_id ORDER BY trajectory_id"
        )
        return self._db.execute(sql).fetchall()
