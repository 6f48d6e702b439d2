"""The store's database: the product's code over SQLite in memory.

Reads   requests of the store's actor
Writes  rows and chunks, which outlive every process
Gives   StoreDatabase, whose answers are checked, over WatchedTables, which check who writes what
        and whether it reads back as written
Raises  DiskFull while a fault has filled the disk, Violation

A commit takes no time here.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from laminar.actors.store import READS
from laminar.names.ports import DiskFull
from laminar.storage import messages as m
from laminar.storage.rows import NotTokenised, PromptKey
from laminar.storage.rules import TOKEN_BYTES, Chunk, Row, TokenSpan
from laminar.storage.tables import Tables
from laminar.storage.transactions import Transactions
from tools.simulator.context import Context
from tools.simulator.runtime.violation import Violation
from tools.simulator.turns import made_of

_KINDS = {m.AppendReply: "append", m.FinishReply: "finish", m.PutRewardsReply: "reward"}


class StoreDatabase(Transactions):
    """The store's database in memory; its disk can be full, and its content outlives processes."""

    def __init__(self, world: Context) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        self.tables = WatchedTables(connection, world)
        in_flight = world.scenario.settings.in_flight
        super().__init__(connection, self.tables, "the store", in_flight=in_flight)
        self._world = world
        self.full = False  #: whether the disk is full

    def load_prompts(
        self, train: Sequence[m.PromptPayload], held_out: Sequence[m.PromptPayload], digest: str
    ) -> None:
        self._must_have_room()
        super().load_prompts(train, held_out, digest)

    def save_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        self._must_have_room()
        super().save_prompt_ids(ids)

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        if not all(isinstance(request, READS) for request in requests):
            self._must_have_room()
        return super().handle_batch(requests)

    def close(self) -> None:
        """Keep the content for the next process."""

    def _must_have_room(self) -> None:
        if self.full:
            raise DiskFull(errno.ENOSPC, "the disk of the store is full")

    def _handle_request(self, request: m.Request) -> m.Reply | NotTokenised:
        self.tables.begin(request)
        reply = super()._handle_request(request)
        if isinstance(reply, m.ErrorReply):
            raise Violation("nothing_is_damaged", reply.reason)
        trains = isinstance(request, m.Fetch) and not request.with_prompt  # not a late scorer
        if trains and isinstance(reply, m.FetchReply) and reply.removed:
            what = f"the tokens of {', '.join(reply.removed)} were removed"
            raise Violation("needed_payload_is_there", what)
        if isinstance(reply, m.EndReply):
            for result in reply.results:
                if result.answer != "ok":
                    what = f"{result.trajectory_id}: {result.reason}"
                    raise Violation("store_takes_every_end", what, result.trajectory_id)
        elif isinstance(reply, m.AppendReply | m.FinishReply | m.PutRewardsReply):
            for written in reply.results:
                if written.answer != "ok":
                    self._world.coverage.hit(f"store:{_KINDS[type(reply)]}-{written.answer}")
        return reply


class WatchedTables(Tables):
    """Tables that report to the checks of a world who writes what, and under which placement."""

    def __init__(self, connection: sqlite3.Connection, world: Context) -> None:
        super().__init__(connection, folder=None)
        self.saved: dict[str, Row] = {}  #: last saved state of each row
        self.without_payload: set[str] = set()
        self._sampled: dict[str, list[TokenSpan]] = {}
        self._world = world
        self._request: m.Request = m.Stats()  #: request that is being handled
        self._placements: dict[str, int] = {}  #: placements of its items, by trajectory

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
        source = chunk.source or row.source
        self._world.checks.contents.stored(row, chunk)
        if spans and spans[-1][:-1] == source:
            tokens += spans.pop().num_tokens
        spans.append(TokenSpan._make((*source, tokens)))
        super().add_chunk(row, chunk)

    def drop_chunks(self, trajectory_id: str) -> None:
        self._sampled.pop(trajectory_id, None)
        super().drop_chunks(trajectory_id)

    def changed(self) -> Iterator[str]:
        """Yield trajectories that no longer read back as written."""
        for row in self.iter_rows():
            sampled = tuple(self._sampled.get(row.id, ()))
            if row != self.saved[row.id] or self.get_spans(row) != sampled:
                yield row.id

    def _placement(self, trajectory_id: str) -> int:
        """Return the placement under which the current request writes to this trajectory."""
        if not self._placements:
            items = self._request.items  # type: ignore[union-attr]
            self._placements = {item.trajectory_id: item.placement for item in reversed(items)}
        return self._placements[trajectory_id]

    def _require_own_tokens(self, row: Row) -> None:
        """Check that the response is that of its seed, whichever replicas generated it."""
        seed = self._world.scenario.seed_of(row)
        found = b"".join(chunk.tokens for chunk in self.load_chunks(row.id))
        made = made_of(self._world.scenario, seed)
        if found != made.tokens[: TOKEN_BYTES * row.num_tokens] or (
            row.num_tokens not in accumulate(made.counts)
        ):
            raise Violation("tokens_continue", f"{row.id} has tokens of another seed", row.id)


def _change(before: Row | None, after: Row) -> str:
    """Return the kind of change that an opening made to a row."""
    if before is None:
        return "create"
    return "restart" if after.attempt > before.attempt else "move"
