"""The store actor: prompts, partial responses and experience of the run, over a socket.

Reads   the data of the configuration; requests of rollouts and trainer; EndTrajectories commands
Writes  store.sqlite (through storage.Database), store-0.json (its address)
Emits   DataLoaded, TrajectoriesEnded

Everything that arrived in one turn of the loop is one transaction; nothing is answered before it is
on disk. The prompts are tokenised here, once.
"""

from __future__ import annotations

import asyncio

import numpy as np

from laminar.actors.host import Host
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.net.client import write_address
from laminar.net.rpc import Batch, RpcError, RpcServer
from laminar.rundir import STORE_FILE
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.tasks.chat import EncodedPrompts, encode_all
from laminar.tasks.prompts import PromptSet, load_prompts
from laminar.tasks.tokenizer import load_tokenizer


class Store:
    """The database behind a socket."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.database = Database(host.run_dir / STORE_FILE)
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
        self.database.load_prompts(train, held_out, prompts.digest)
        await self.server.start()
        write_address(self.host.run_dir / f"{self.host.name}.json", self.server.address)
        self.host.spawn(self.server.wait_closed())
        count = self.database.prompt_count()
        loaded = ev.DataLoaded(
            num_train=count.train,
            num_eval=count.held_out,
            overlap=prompts.overlap,
            digest=count.digest,
        )
        self.host.emit(loaded, train=count.train, held_out=count.held_out)

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
        ending = [(o, c) for o, c in orders if isinstance(c, cmd.EndTrajectories)]
        requests = [m.End(items=tuple(_end_item(e) for e in c.endings)) for _, c in ending]
        replies = self.database.handle_batch(requests) if requests else []
        for (order, _), reply in zip(ending, replies, strict=True):
            if not isinstance(reply, m.EndReply):
                return self.host.fail(f"the store could not end trajectories: {reply}")
            self._report_ends(order, reply)

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
        self.database.close()

    def _handle_batch(self, batch: Batch) -> list[bytes | RpcError]:
        """Bad bytes are answered with an error; the others share one commit."""
        answers: list[bytes | RpcError] = [b""] * len(batch)
        requests, places = [], []
        for index, (_, _, body) in enumerate(batch):
            try:
                requests.append(m.decode_request(body))
                places.append(index)
            except m.StoreWireError as error:
                answers[index] = RpcError(str(error))
        if requests:
            for index, reply in zip(places, self.database.handle_batch(requests), strict=True):
                answers[index] = m.encode(reply)
        return answers


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
