"""Typed clients of the store and of the relay on the same machine.

Reads   replies of the two servers
Emits   typed requests

Deadline, codec and the check of the answer's type are here only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from laminar.events.families import Message
from laminar.net.calls import FLUSH_S, Client
from laminar.storage import messages as store
from laminar.weights import messages as relay

RPC_TIMEOUT_S = 120.0  #: timeout of a request; a local server that is silent for two minutes hangs

Answer = TypeVar("Answer", bound=Message)


class TokensRemoved(RuntimeError):
    """The store has removed the tokens of these trajectories, which ended long ago."""


class StoreClient:
    """Typed requests to the store; an answer of another type is an error of the program."""

    def __init__(self, rpc: Client, disk_full_timeout_s: float) -> None:
        """Use `rpc`; `disk_full_timeout_s`: how long the store may wait for space on its disk."""
        self._rpc = rpc
        self._timeout_s = RPC_TIMEOUT_S + disk_full_timeout_s

    async def start(self) -> None:
        await self._rpc.start()

    async def close(self, flush_s: float = FLUSH_S) -> None:
        await self._rpc.close(flush_s)

    async def send_request(self, request: store.Request, answer: type[Answer]) -> Answer:
        reply = store.decode_reply(await self._rpc.call(store.encode(request), self._timeout_s))
        if not isinstance(reply, answer):
            raise RuntimeError(f"the store answered {type(request).__name__} with {reply!r:.200}")
        return reply

    async def remove_payloads(self, before_step: int, keep_bytes: int) -> int:
        """Remove payloads (see RemovePayloads); return how many. RpcError, TimeoutError."""
        removed = 0
        request = store.RemovePayloads(before_step=before_step, keep_bytes=keep_bytes)
        while part := (await self.send_request(request, store.RemovePayloadsReply)).removed:
            removed += part
        return removed

    async def fetch(self, ids: Sequence[str], *, with_prompt: bool) -> list[store.StoredTrajectory]:
        """Return trajectories in the order of `ids`, by several requests if they are large.

        RpcError, TimeoutError. TokensRemoved: the order came late and its group was dropped
        meanwhile, or the checkpoint of a repeated step was removed by hand.
        """
        found: dict[str, store.StoredTrajectory] = {}
        missing = deque(ids)  # a deque is not searched for every reply: a batch can be 200,000
        asked = store.MAX_ITEMS
        while missing:
            part = tuple(missing.popleft() for _ in range(min(len(missing), asked)))
            reply = await self.send_request(
                store.Fetch(ids=part, with_prompt=with_prompt), store.FetchReply
            )
            if reply.unknown:
                raise RuntimeError(f"the store does not have {', '.join(reply.unknown[:5])}")
            if reply.removed:
                raise TokensRemoved(f"the store has removed {', '.join(reply.removed[:5])}")
            found.update((row.trajectory_id, row) for row in reply.trajectories)
            missing.extendleft(reversed(reply.left_out))
            # The store looks up all requested ids, even those that do not fit into the reply.
            asked = min(store.MAX_ITEMS, 2 * max(1, len(reply.trajectories)))
        return [found[wanted] for wanted in ids]


class RelayClient:
    """Typed requests to the relay of this machine."""

    def __init__(self, rpc: Client) -> None:
        self._rpc = rpc

    async def start(self) -> None:
        await self._rpc.start()

    async def close(self, flush_s: float = FLUSH_S) -> None:
        await self._rpc.close(flush_s)

    async def send_request(
        self, request: relay.Request, *answers: type[Answer], timeout_s: float = RPC_TIMEOUT_S
    ) -> Answer:
        """Return the answer of the relay, or of its successor after a restart.

        RpcError if it refuses, TimeoutError.
        """
        reply = relay.decode_reply(await self._rpc.call(relay.encode(request), timeout_s))
        for answer in answers:
            if isinstance(reply, answer):
                return reply
        raise RuntimeError(f"the relay answered {type(request).__name__} with {reply!r:.200}")
