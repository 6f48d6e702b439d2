"""The store actor: prompts, partial responses and experience of the run, over a socket.

Reads   the data of the configuration; requests of rollouts and trainer; EndTrajectories commands
Writes  store.sqlite (through storage.Database), store-0.json (its address)
Emits   DataLoaded, TrajectoriesEnded

Everything that arrived in one turn of the loop is one transaction; nothing is answered before it is
on disk. While the disk is full, requests that write wait, those that read are answered. The prompts
are tokenised here, once.
"""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial

import numpy as np

from laminar.actors.disk_wait import DiskWait
from laminar.actors.host import Host
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.net.client import write_address
from laminar.net.rpc import Batch, RpcError, RpcServer
from laminar.ports import DiskError
from laminar.rundir import STORE_FILE
from laminar.storage import messages as m
from laminar.storage.database import Database, PromptCount
from laminar.tasks.chat import EncodedPrompts, encode_all
from laminar.tasks.prompts import PromptSet, load_prompts
from laminar.tasks.tokenizer import load_tokenizer

READS = (m.Fetch, m.SamplePrompts, m.Stats)
"""Requests that need no room."""


class Store:
    """The database behind a socket."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.database: Database | None = None
        self._disk = DiskWait(host, "the store")
        self._endings: list[tuple[cmd.Order, cmd.EndTrajectories]] = []  #: not on disk yet
        self._ending = False  #: they are being written
        self.server = RpcServer(
            host.address,
            0,
            self._handle_batch,
            boot_id=host.boot_id,
            lease_ms=host.config.coordinator.lease_ms,
            on_peer_lost=lambda name: host.log.info("peer-lost", peer=name),
        )

    async def start(self) -> None:
        prompts, train, held_out = await asyncio.to_thread(self._load_data)
        fill = partial(self._fill, train, held_out, prompts.digest)
        count = await self._disk.until_room(fill)
        await self.server.start()
        await self._disk.until_room(self._tell_address)
        self.host.spawn(self.server.wait_closed())
        loaded = ev.DataLoaded(
            num_train=count.train,
            num_eval=count.held_out,
            overlap=prompts.overlap,
            digest=count.digest,
        )
        self.host.emit(loaded, train=count.train, held_out=count.held_out)

    async def _fill(
        self, train: list[m.PromptPayload], held_out: list[m.PromptPayload], digest: str
    ) -> PromptCount:
        if self.database is None:
            self.database = Database(self.host.run_dir / STORE_FILE)
        self.database.load_prompts(train, held_out, digest)
        return self.database.prompt_count()

    async def _tell_address(self) -> None:
        write_address(self.host.run_dir / f"{self.host.name}.json", self.server.address)

    def _load_data(self) -> tuple[PromptSet, list[m.PromptPayload], list[m.PromptPayload]]:
        """Read and tokenise everything (in a thread: the lease goes on meanwhile)."""
        data = self.host.config.data
        prompts = load_prompts(data)
        tokenizer = load_tokenizer(self.host.config.model.name)
        train = encode_all(tokenizer, prompts.train, data)
        held_out = encode_all(tokenizer, prompts.held_out, data)
        return prompts, payloads(train), payloads(held_out)

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        """All endings that arrived together are one transaction."""
        self._endings += [(o, c) for o, c in orders if isinstance(c, cmd.EndTrajectories)]
        if self._endings and not self._ending:
            self._ending = True
            self.host.spawn(self._end())

    async def _end(self) -> None:
        while self._endings:
            ending, self._endings = self._endings, []
            requests = [m.End(items=tuple(_end_item(e) for e in c.endings)) for _, c in ending]
            replies = await self._disk.until_room(partial(self._handle, requests))
            for (order, _), reply in zip(ending, replies, strict=True):
                if not isinstance(reply, m.EndReply):
                    return self.host.fail(f"the store could not end trajectories: {reply}")
                self._report_ends(order, reply)
        self._ending = False

    async def _handle(self, requests: list[m.End]) -> list[m.Reply]:
        assert self.database is not None, "orders come when the store has reported its data"
        return self.database.handle_batch(requests)

    def _report_ends(self, order: cmd.Order, reply: m.EndReply) -> None:
        for result in reply.results:
            if result.answer != "ok":
                return self.host.fail(f"ending {result.trajectory_id}: {result.reason}")
        ended = tuple(
            ev.EndedTrajectory(
                trajectory=r.trajectory_id,  # type: ignore[arg-type]
                num_tokens=r.num_tokens,
                tokens_lost=r.tokens_lost,
            )
            for r in reply.results
        )
        event = ev.TrajectoriesEnded(command_id=order.command_id, ended=ended)
        self.host.emit(event, event_seq=order.cause, count=len(ended))

    async def stop(self) -> None:
        await self.server.close()
        if self.database is not None:
            self.database.close()

    def _handle_batch(self, batch: Batch) -> list[bytes | RpcError | None]:
        """Bad bytes are answered with an error; the others share one commit, or wait for room."""
        answers: list[bytes | RpcError | None] = [None] * len(batch)
        requests: list[m.Request] = []
        places = []
        for index, (_, _, body) in enumerate(batch):
            try:
                requests.append(m.decode_request(body))
                places.append(index)
            except m.StoreWireError as error:
                answers[index] = RpcError(str(error))
        for index, reply in zip(places, self._answered(requests), strict=True):
            answers[index] = None if reply is None else m.encode(reply)
        return answers

    def _answered(self, requests: list[m.Request]) -> list[m.Reply | None]:
        """None for what writes while there is no room; raises when that lasts too long."""
        assert self.database is not None, "the server listens when the database is filled"
        if not requests:
            return []
        try:
            replies: list[m.Reply | None] = [*self.database.handle_batch(requests)]
        except (sqlite3.Error, DiskError) as error:
            self._disk.failed(error)
            reads = [request for request in requests if isinstance(request, READS)]
            found = iter(self.database.handle_batch(reads))
            return [next(found) if isinstance(r, READS) else None for r in requests]
        if not all(isinstance(request, READS) for request in requests):
            self._disk.worked()
        return replies


def payloads(prompts: EncodedPrompts) -> list[m.PromptPayload]:
    """Rows and their token ids as the store keeps them."""
    return [
        m.PromptPayload(
            prompt=row.prompt,
            ground_truth=row.ground_truth,
            columns=row.columns,
            data_source=row.data_source,
            prompt_ids=np.asarray(ids, dtype="<i4").tobytes(),
        )
        for row, ids in zip(prompts.rows, prompts.ids, strict=True)
    ]


def _end_item(ending: cmd.Ending) -> m.EndItem:
    return m.EndItem(
        trajectory_id=ending.trajectory,
        group_id=ending.group,
        sibling=ending.sibling,
        purpose=ending.purpose,  # type: ignore[arg-type]
        row_index=ending.row_index,
        placement=ending.placement,
        end=ending.end,  # type: ignore[arg-type]
        reason=ending.reason,
        step=max(ending.step, 0),
    )
