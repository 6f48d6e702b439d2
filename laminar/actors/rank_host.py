"""The host of a trainer node's ranks: starts them when the trainer says so, and ends them.

Reads   StartRanks and orders of the trainer, over the link (actors/rank_link.py)
Writes  RUN/NAME.lock, held as long as one of its ranks lives
Starts  the ranks of its node (training/rank_processes.py), as its children
Emits   to the trainer: their results, their requests to the table of keys, and their loss

The coordinator sees it as a process that joins, and orders nothing of it. It ends its ranks when
the trainer is silent for coordinator.node_lease_ms; they end themselves when it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from laminar.actors.host import Host
from laminar.actors.rank_link import LinkEnded, StartRanks, ToHost, TrainerLink
from laminar.events import commands as cmd
from laminar.events.base import Command
from laminar.run.child_channel import Ready
from laminar.training.rank_processes import (
    BeatMessage,
    DoneMessage,
    OrderMessage,
    RankError,
    RankProcesses,
    make_failure,
)
from laminar.training.rank_store import StoreForward, StoreReply

STOP_S = 5.0  #: longest wait of a host that is to end for the trainer to end its ranks


class RankHost:
    """The actor of one host."""

    def __init__(self, host: Host, program: Sequence[str]) -> None:
        """Set up; `program`: the module of a rank and its words, for RankProcesses."""
        self.host, self._program = host, program
        self._client = host.make_client("trainer-0")
        self._lease_s = host.config.coordinator.node_lease_ms / 1000
        self.ranks: RankProcesses | None = None  #: of the present trainer
        self._idle = asyncio.Event()

    async def start(self) -> None:
        await self._client.start()
        self._idle.set()
        self.host.spawn(self._serve_trainers())

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        """Handle nothing: the coordinator orders nothing of a host."""

    async def stop(self) -> None:
        if self.host.ordered_to_stop:  # so is the trainer, which ends its ranks
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._idle.wait()
        if self.ranks is not None:
            await self.ranks.close()
        await self._client.close(0.5)

    async def _serve_trainers(self) -> None:
        """Serve one trainer after another, each with new ranks."""
        while True:
            link = TrainerLink(self._client, self.host.node, self._lease_s, self._receive)
            self._link, self._stored = link, StoreForward(link.send)
            try:
                await link.run()
            except LinkEnded as ended:
                if self.ranks is not None:
                    self.host.log.info("ranks-ended", reason=str(ended))
                    ranks, self.ranks = self.ranks, None
                    await ranks.close()
                self._idle.set()

    def _receive(self, message: ToHost) -> None:
        if isinstance(message, StartRanks):
            self._idle.clear()
            self.host.spawn(self._start_ranks(message.node))
        elif isinstance(message, OrderMessage):
            self.host.spawn(self._carry_out(self._link, message))
        elif isinstance(message, StoreReply):
            self._stored.handle_reply(message)
        elif not isinstance(message, BeatMessage):
            raise TypeError(message)

    async def _start_ranks(self, node: int) -> None:
        host, count, link = self.host, self.host.config.trainer.ranks, self._link

        def lost(reason: str) -> None:
            link.send(make_failure(0, RankError(reason)))

        ranks = self.ranks = RankProcesses(
            host.config,
            self._program,
            lock=host.run_dir / f"{host.name}.lock",
            lost=lost,
            say=host.notify_user,
            numbers=range(node * count, (node + 1) * count),
            submit=self._stored.submit,
        )
        host.log.info("ranks-starting", node=node, ranks=count)
        try:
            await ranks.start()
        except RankError:
            return  # `lost` has said so
        link.send(Ready())

    async def _carry_out(self, link: TrainerLink, order: OrderMessage) -> None:
        assert self.ranks is not None
        try:
            bodies = await self.ranks.call_ranks(order.body)
        except RankError:
            return  # `lost` has said so
        except Exception as error:
            number = order.number if isinstance(error, OSError) else 0
            link.send(make_failure(number, error))
            return
        link.send(DoneMessage(number=order.number, bodies=tuple(bodies)))
