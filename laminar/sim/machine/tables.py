"""Checks of the store's tables: who writes what, and whether they say what was written.

Reads   the requests that are handled; each row and chunk on its way into the real tables
Gives   WatchedTables, for the database of models/store.py. Raises Violation
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING

from laminar.engines.made_up_tokens import tokens_of
from laminar.events.reasons import FinishReason
from laminar.sim.runtime.violation import Violation
from laminar.storage import messages as m
from laminar.storage.rules import TOKEN_BYTES, Chunk, Row, Span
from laminar.storage.tables import Tables

if TYPE_CHECKING:
    from laminar.sim.world import World


class WatchedTables(Tables):
    """Tables that tell the checks of a world who writes what, and under which placement."""

    def __init__(self, connection: sqlite3.Connection, world: World) -> None:
        super().__init__(connection, folder=None)
        self.saved: dict[str, Row] = {}  #: each row as it was saved last
        self.without_payload: set[str] = set()
        self._sampled: dict[str, list[Span]] = {}
        self._world = world
        self._request: m.Request = m.Stats()  #: that is being handled, and
        self._placements: dict[str, int] = {}  #: by trajectory, what it writes to

    def begin(self, request: m.Request) -> None:
        self._request, self._placements = request, {}

    def remove_payload(self, trajectory_id: str) -> None:
        self._world.coverage.hit("store:payload-removed")
        self.without_payload.add(trajectory_id)
        super().remove_payload(trajectory_id)

    def save(self, before: Row | None, after: Row) -> None:
        if isinstance(self._request, m.Open):
            self._world.coverage.hit(f"store:open-{after.status}-{_change(before, after)}")
        if after.status == "generated" and (before is None or before.status == "open"):
            self._require_own_tokens(after)
        if before != self.saved.get(after.id):
            raise Violation("nothing_is_damaged", f"{after.id} is not what was saved", after.id)
        self._world.checks.stored(after, self._placement(after.id))
        self.saved[after.id] = after
        super().save(before, after)

    def add_chunk(self, row: Row, chunk: Chunk) -> None:
        spans, tokens = self._sampled.setdefault(row.id, []), len(chunk.tokens) // TOKEN_BYTES
        if spans and spans[-1][:-1] == row.source:
            tokens += spans.pop().num_tokens
        spans.append(Span._make((*row.source, tokens)))
        super().add_chunk(row, chunk)

    def drop_chunks(self, trajectory_id: str) -> None:
        self._sampled.pop(trajectory_id, None)
        super().drop_chunks(trajectory_id)

    def changed(self) -> Iterator[str]:
        """Trajectories of which it says something else than was written."""
        for row in self.rows():
            sampled = tuple(self._sampled.get(row.id, ()))
            if row != self.saved[row.id] or self.spans(row) != sampled:
                yield row.id

    def _placement(self, trajectory_id: str) -> int:
        """The placement under which the present request writes to this trajectory."""
        if not self._placements:
            items = self._request.items  # type: ignore[union-attr]
            self._placements = {item.trajectory_id: item.placement for item in reversed(items)}
        return self._placements[trajectory_id]

    def _require_own_tokens(self, row: Row) -> None:
        """Whichever replica generated which part: the response is the one of its seed."""
        seed = self._world.scenario.seed_of(row)
        found = b"".join(chunk.tokens for chunk in self.chunks(row.id))
        if found != tokens_of(seed, 0, row.num_tokens, ends=row.finish_reason == FinishReason.STOP):
            raise Violation("tokens_continue", f"{row.id} has tokens of another seed", row.id)


def _change(before: Row | None, after: Row) -> str:
    """What an opening has made of a row."""
    if before is None:
        return "create"
    return "restart" if after.attempt > before.attempt else "move"
