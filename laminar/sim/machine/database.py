"""The store's database, which is the product's with SQLite in memory.

Reads   requests of the store's actor
Writes  rows and chunks, which no death of a process takes away
Gives   StoreDatabase, whose answers are checked. Raises DiskFull while a fault has filled the
        disk, Violation

A commit takes no time here.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from laminar.actors.store import READS
from laminar.names.ports import DiskFull
from laminar.sim.machine.tables import WatchedTables
from laminar.sim.runtime.violation import Violation
from laminar.storage import messages as m
from laminar.storage.rows import NotTokenised, PromptKey
from laminar.storage.transactions import Transactions

if TYPE_CHECKING:
    from laminar.sim.world import World

_KINDS = {m.AppendReply: "append", m.FinishReply: "finish", m.PutRewardsReply: "reward"}


class StoreDatabase(Transactions):
    """The store's own, in memory. Its disk can be full; a process that ends takes nothing away."""

    def __init__(self, world: World) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        self.tables = WatchedTables(connection, world)
        super().__init__(connection, self.tables, "the store")
        self._world = world
        self.full = False  #: its disk

    def load_prompts(
        self, train: Sequence[m.PromptPayload], held_out: Sequence[m.PromptPayload], digest: str
    ) -> None:
        self._must_have_room()
        super().load_prompts(train, held_out, digest)

    def keep_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        self._must_have_room()
        super().keep_prompt_ids(ids)

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        if not all(isinstance(request, READS) for request in requests):
            self._must_have_room()
        return super().handle_batch(requests)

    def close(self) -> None:
        """The next process finds it as it is."""

    def _must_have_room(self) -> None:
        if self.full:
            raise DiskFull(errno.ENOSPC, "the disk of the store is full")

    def _handle(self, request: m.Request) -> m.Reply | NotTokenised:
        self.tables.begin(request)
        reply = super()._handle(request)
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
