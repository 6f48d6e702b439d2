"""The store's database, which is the product's with SQLite in memory; and its prompts.

Reads   requests of the store's actor
Writes  rows and chunks, which no death of a process takes away
Gives   StoreDatabase, whose answers are checked; StoreProcess, where its data comes from.
        Raises DiskFull while a fault has filled the disk, Violation

A commit takes no time here.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Mapping, Sequence

import numpy as np

from laminar.actors.host import Actor, Host
from laminar.actors.store import READS, Store
from laminar.engines.made_up_tokens import prompt_of
from laminar.ports import DiskFull
from laminar.sim.checks.tables import WatchedTables
from laminar.sim.interfaces import World
from laminar.sim.models.idle import Idle
from laminar.sim.runtime.violation import Violation
from laminar.sim.scenario import DATA_DIGEST
from laminar.storage import messages as m
from laminar.storage.rows import LoadedPrompts, NotTokenised, PromptKey
from laminar.storage.transactions import Transactions

_PROMPT = m.PromptPayload(prompt="", ground_truth=None, columns={}, data_source="made")
TOKENISE_S = 0.01
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


class StoreProcess(Idle):
    """The process of the store; where its prompts come from, and a tokenizer that takes a while."""

    def make_actor(self, host: Host) -> Actor:
        return Store(host, lambda: self.world.database, self)

    async def load(self) -> LoadedPrompts:
        await self._work(self.chance.uniform(0, self.scenario.start_s))
        train, held_out = self.scenario.num_train, self.scenario.num_eval
        return LoadedPrompts([_PROMPT] * train, [_PROMPT] * held_out, 0, DATA_DIGEST)

    async def tokenise(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        await self._work(self.chance.uniform(0, TOKENISE_S))
        return {key: np.array(prompt_of(*key), "<i4").tobytes() for key in prompts}

    async def _work(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.process.slow)
