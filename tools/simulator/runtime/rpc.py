"""Requests between simulated processes: numbered bytes, retried until answered, handled once.

Reads   requests of actors; what the network delivers
Gives   SimClient and SimServer, the two ends of net/calls.py

The only part of the traffic between processes that is not the real code. It keeps the guarantees of
net/ (in order and once within one pair of boots, however often the network loses or repeats; a
request left open by a dead server is sent to the next one; a peer that is silent for its lease, or
says Bye, is reported as lost) without sessions, whose heartbeats and acknowledgements would be half
of all calls of the scheduler. All requests of a process in one turn travel in one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from laminar.config import Config
from laminar.net.calls import FLUSH_S, Batch, Handler, RpcError, ServingState
from laminar.net.session import LinkClosed
from tools.simulator.context import Process
from tools.simulator.runtime.loop import SimLoop
from tools.simulator.scheduler import MS, Action

RETRY_NS = 400 * MS  #: longer than a round trip, so that retries are rare on a healthy network
TURN_NS = MS // 5  #: time within which arriving requests form one turn of a server
AGAIN_NS = 250 * MS  #: pause before a deferred request is handled again
FLUSH_POLL_S = 0.05
LEASE_LOOKS = 3  #: checks for lost peers within one lease

Requests = tuple[tuple[int, bytes], ...]
Replies = tuple[tuple[int, bytes | RpcError], ...]


@dataclass(slots=True)
class Call:
    """A request that awaits its reply."""

    body: bytes
    reply: asyncio.Future[bytes]
    deadline_ns: int


@dataclass(slots=True, frozen=True)
class Message:
    """A message of a client."""

    first: int  #: lowest number without a reply
    before: int  #: open request before those of this message; 0: none
    requests: Requests
    bye: bool = False


class Endpoint(Protocol):
    """The boot of a process that sends or serves requests."""

    process: Process
    name: str
    boot_id: str
    config: Config
    loop: SimLoop

    @property
    def runs(self) -> bool: ...
    def after(self, delay_ns: int, action: Action, *args: Any) -> None: ...
    def after_turn(self, action: Callable[[], None]) -> None: ...
    def deliver(self, action: Action, *args: Any) -> None: ...
    def enter_reply(self, server: str, replies: Replies) -> None: ...


class SimClient:
    """The client of one boot for the server of one name."""

    def __init__(self, boot: Endpoint, server: str) -> None:
        self._boot, self._server = boot, server
        self._world = boot.process.world
        self._link = self._world.network.link(boot.name, server)
        self._number = 0
        self._open: dict[int, Call] = {}
        self._new: list[int] = []  #: numbers not sent yet
        self._retrying = self._closed = False

    async def start(self) -> None:
        """Do nothing: the server is looked up with every message."""

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        if self._closed:
            raise LinkClosed(f"the link to {self._server} is closed")
        boot, now = self._boot, self._world.scheduler.now
        self._number = number = self._number + 1
        reply: asyncio.Future[bytes] = boot.loop.create_future()
        self._open[number] = Call(body, reply, now + int(timeout_s * 1e9))
        self._new.append(number)
        boot.after_turn(self._send_new)
        if not self._retrying:
            self._retrying = True
            boot.after(RETRY_NS, self._retry, number)
        try:
            return await reply
        finally:
            self._open.pop(number, None)

    async def close(self, flush_s: float = FLUSH_S) -> None:
        deadline_s = self._boot.loop.time() + flush_s
        while self._open and self._boot.loop.time() < deadline_s:
            await asyncio.sleep(FLUSH_POLL_S)
        self._closed = True
        for call in self._open.values():
            if not call.reply.done():
                call.reply.set_exception(LinkClosed(f"the link to {self._server} is closed"))
        self._send(Message(self._number + 1, 0, (), bye=True))

    def _send_new(self) -> None:
        new, self._new = [n for n in self._new if n in self._open], []
        if not new:
            return
        before = max((n for n in self._open if n < new[0]), default=0)
        self._send_open(new, before)

    def _send_open(self, numbers: list[int], before: int) -> None:
        requests = tuple((n, self._open[n].body) for n in numbers)
        self._send(Message(next(iter(self._open)), before, requests))

    def _send(self, message: Message) -> None:
        self._world.network.send(self._link, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        server = self._world.servers.get(self._server)
        if server is not None:
            server.receive(self._boot, message)

    def _retry(self, seen: int) -> None:
        """Resend requests that have been open for a while, and fail overdue ones."""
        now = self._world.scheduler.now
        for number, call in list(self._open.items()):
            if now >= call.deadline_ns and not call.reply.done():
                call.reply.set_exception(
                    TimeoutError(f"{self._server} did not answer request {number} in time")
                )
                del self._open[number]
        old = [n for n in self._open if n <= seen]
        if old:
            self._send_open(old, 0)
        self._retrying = bool(self._open)
        if self._retrying:
            self._boot.after(RETRY_NS, self._retry, self._number)

    def answered(self, replies: Replies) -> None:
        """Accept replies and discard repeats."""
        for number, reply in replies:
            call = self._open.get(number)
            if call is None or call.reply.done():
                continue
            if isinstance(reply, RpcError):
                call.reply.set_exception(reply)
            else:
                call.reply.set_result(reply)


@dataclass(slots=True)
class Peer:
    """A server's record of one boot of a client."""

    boot: Endpoint
    heard_ns: int
    first: int = 1
    replies: dict[int, bytes | RpcError] = field(default_factory=dict)
    waiting: dict[int, bytes] = field(default_factory=dict)  #: not handled yet
    due: dict[int, None] = field(default_factory=dict)  #: replies due in the next turn


class SimServer:
    """A server that handles each client's requests in order."""

    def __init__(
        self, boot: Endpoint, handle_batch: Handler, on_peer_lost: Callable[[str], None]
    ) -> None:
        self._boot, self._handle_batch, self._on_peer_lost = boot, handle_batch, on_peer_lost
        self._world = boot.process.world
        self._lease_ns = boot.config.coordinator.lease_ms * MS
        self._peers: dict[str, Peer] = {}  #: by boot id
        self._awake: dict[str, Peer] = {}  #: peers of the next turn, in order of arrival
        self._held: dict[str, Peer] = {}  #: peers with a deferred request
        self._planned = self._again_planned = False
        self._looked_ns = self._world.scheduler.now
        self._serving = ServingState()

    @property
    def address(self) -> str:
        return self._boot.name

    async def start(self) -> None:
        self._serving.mark_started(self._boot.loop)
        self._boot.after(self._lease_ns // LEASE_LOOKS, self._look)

    def retry_held(self) -> None:
        self._awake |= self._held
        self._held.clear()
        self._plan(0)

    async def wait_closed(self) -> None:
        await self._serving.wait_closed()

    async def close(self) -> None:
        self._serving.mark_ended(None)

    # --- requests -----------------------------------------------------------------------------

    def receive(self, client: Endpoint, message: Message) -> None:
        """Receive a message at the machine of this server."""
        self._boot.deliver(self._take, client, message)

    def _take(self, client: Endpoint, message: Message) -> None:
        if not self._serving:
            return
        if message.bye:
            return self._lose(client.boot_id)
        peer = self._peers.get(client.boot_id)
        if peer is None:
            peer = self._peers[client.boot_id] = Peer(client, self._world.scheduler.now)
        peer.heard_ns = self._world.scheduler.now
        peer.first = max(peer.first, message.first)
        for old in [n for n in peer.replies if n < peer.first]:
            del peer.replies[old]
        before = message.before
        for number, body in message.requests:
            if number < peer.first:
                continue  # answered, or no longer wanted
            if number in peer.replies:
                peer.due[number] = None
            elif number not in peer.waiting:
                if before >= peer.first and not (before in peer.replies or before in peer.waiting):
                    break  # an earlier one was lost; both are retried
                peer.waiting[number] = body
            before = number
        self._awake[client.boot_id] = peer
        self._plan(TURN_NS)

    def _plan(self, delay_ns: int) -> None:
        if not self._planned:
            self._planned = True
            self._boot.after(delay_ns, self._turn)

    def _hand_over_again(self) -> None:
        self._again_planned = False
        self.retry_held()

    def _turn(self) -> None:
        self._planned = False
        if self._serving:
            self._boot.loop.enter(self._handle)

    def _handle(self) -> None:
        awake, self._awake = self._awake, {}
        asked = [(peer, n) for peer in awake.values() for n in peer.waiting]
        if asked:
            batch: Batch = [(p.boot.boot_id, n, p.waiting[n]) for p, n in asked]
            try:
                replies = self._handle_batch(batch)
            except Exception as error:
                return self._serving.mark_ended(error)
            self._note(asked, replies)
        for peer in awake.values():
            self._answer(peer)

    def _note(self, asked: list[tuple[Peer, int]], replies: list[bytes | RpcError | None]) -> None:
        held: dict[str, Peer] = {}
        for (peer, number), reply in zip(asked, replies, strict=True):
            if reply is None or peer.boot.boot_id in held:
                held[peer.boot.boot_id] = peer
            else:
                del peer.waiting[number]
                peer.replies[number] = reply
                peer.due[number] = None
        self._held |= held
        if held and not self._again_planned:
            self._again_planned = True
            self._boot.after(AGAIN_NS, self._hand_over_again)

    def _answer(self, peer: Peer) -> None:
        if not peer.due:
            return
        replies = tuple((n, peer.replies[n]) for n in peer.due if n in peer.replies)
        peer.due.clear()
        client, name, network = peer.boot, self._boot.name, self._world.network
        network.send(
            network.link(name, client.name),
            lambda replies: client.deliver(client.enter_reply, name, replies),
            replies,
        )

    # --- lost peers ---------------------------------------------------------------------------

    def _look(self) -> None:
        """Lose silent peers; heartbeats of live peers are implied by their links, not sent."""
        if not self._serving:
            return
        now, network = self._world.scheduler.now, self._world.network
        paused = now - self._looked_ns > self._lease_ns // LEASE_LOOKS + self._lease_ns // 10
        self._looked_ns = now
        for peer in list(self._peers.values()):
            link = network.link(peer.boot.name, self._boot.name)
            if paused or (peer.boot.runs and not (link.blocked or link.clogged)):
                peer.heard_ns = now
            elif now - peer.heard_ns > self._lease_ns:
                self._lose(peer.boot.boot_id)
        self._boot.after(self._lease_ns // LEASE_LOOKS, self._look)

    def _lose(self, boot_id: str) -> None:
        """Drop a peer and its open requests: nothing would release what they were granted."""
        if self._peers.pop(boot_id, None) is not None:
            self._awake.pop(boot_id, None)
            self._held.pop(boot_id, None)
            self._boot.loop.enter(self._on_peer_lost, boot_id)
