"""The server end of request and reply over a session, with group commit.

Reads   requests of peers
Emits   replies, and which processes were lost

A server handles the requests of one turn together, so that a store makes them durable with one
commit; then they are acknowledged and answered. A request may reach the handler twice after a
restart of either side (rpc_client.py), so handling must be idempotent. A handler that raises ends
the server: `wait_closed` raises the same exception, and nothing of that turn is acknowledged or
answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from laminar.events.families import Family, WireError
from laminar.net.auth import RunKeys
from laminar.net.calls import Handler, Reply, Request, RpcError, ServingState
from laminar.net.client import LINGER_MS, now_ns
from laminar.net.descriptors import clients_allowed
from laminar.net.frames import FRAME_BYTES_MAX, Hello, Refused, decode_client, encode
from laminar.net.links import Links
from laminar.net.session import MS, Limits, LinkState, OutboxFull, ServerLink
from laminar.net.transport import DRAIN_FRAMES, ServerSocket

RETRY_MS = 250  #: the pause before a held request is passed to the handler again
BODY_BYTES_MAX = Limits().max_body

_encode = msgspec.msgpack.Encoder().encode
_requests = Family[Request](Request, "a message is not a request: {error}")


class _Peer(ServerLink):
    """The link of a client of an RpcServer."""

    def __init__(self, hello: Hello, server_boot: str) -> None:
        super().__init__(hello, server_boot=server_boot, incarnation=hello.incarnation)
        self.requests: deque[tuple[int, Request]] = deque()  #: (number on the link, request)
        self.replies: deque[bytes] = deque()  #: replies for which its outbox had no room

    def flush(self) -> None:
        """Queue replies while there is room; a refused client gets none."""
        while self.replies and self.state is LinkState.UP:
            try:
                self.send(self.replies[0])
            except OutboxFull:
                return
            self.replies.popleft()


class RpcServer:
    """A server that calls its handler once per turn with all requests that arrived in it."""

    def __init__(
        self,
        host: str,
        port: int,
        handle_batch: Handler,
        *,
        keys: RunKeys,
        boot_id: str,
        lease_ms: int,
        on_peer_lost: Callable[[str], None],
        on_rejected: Callable[[str], object] = lambda told: None,
    ) -> None:
        """Bind the server's socket.

        `on_peer_lost(boot_id)`: that process said Bye, or was silent for `lease_ms`. `on_rejected`:
        see ServerSocket.
        """
        self._socket = ServerSocket(host, port, keys, on_rejected=on_rejected)
        self._handle_batch = handle_batch
        self._boot_id = boot_id
        self._lease_ns = lease_ms * MS
        self._on_peer_lost = on_peer_lost
        self._links = Links[_Peer](clients_allowed())
        self._held: dict[str, None] = {}  #: boot ids with a request that could not be handled yet
        self._links_made = 0
        self._looked_ns = self._grace_from_ns = now_ns()
        self._next_look_ns = self._looked_ns + self._lease_ns  #: no present lease ends before
        self._serving = ServingState()

    @property
    def address(self) -> str:
        """The address, as tcp://host:port."""
        return self._socket.address

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._serving.mark_started(loop)
        self._socket.attach_loop(loop, self._run_turn)

    async def wait_closed(self) -> None:
        """Return after `close`; raise what the handler or a callback raised."""
        await self._serving.wait_closed()

    def retry_held(self) -> None:
        """Hand held requests to the handler now instead of after RETRY_MS."""
        if self._serving:
            for boot_id in self._held:
                self._links.wake_link(boot_id)
            self._run_turn()

    async def close(self) -> None:
        """Stop listening; clients repeat unhandled requests to the next server."""
        self._end_serving(None)

    def _run_turn(self) -> None:
        try:
            frames = self._socket.drain_frames()
            for route, frame in frames:
                self._receive_frame(route, frame, now_ns())
            due = self._links.take_due(now_ns())
            self._handle_requests(due)
            self._send_due(due)
            if len(frames) < DRAIN_FRAMES:
                self._judge_silence(now_ns())
        except Exception as error:
            self._end_serving(error)

    def _receive_frame(self, route: bytes, frame: bytes, now: int) -> None:
        try:
            peer = self._links.find_link(route) or self._connect_peer(route, frame)
            if peer is not None:
                self._links.wake_link(peer.boot_id)
                self._take_requests(peer, self._links.receive(peer, frame, now))
        except WireError:
            return  # as if it were lost

    def _connect_peer(self, route: bytes, frame: bytes) -> _Peer | None:
        """Assign a new connection to its client, which may be new or may have reconnected."""
        hello = decode_client(frame, FRAME_BYTES_MAX)
        if not isinstance(hello, Hello):
            return None  # sent before our start: the sender will say Hello when it gets no answer
        peer = self._links.get(hello.boot_id)
        if peer is None:
            if reason := self._links.find_refusal_reason():
                self._socket.send(route, encode(Refused(reason)))
                return None
            self._links_made += 1
            peer = _Peer(hello, f"{self._boot_id}.{self._links_made}")
            self._links.add(peer)
        self._links.set_route(hello.boot_id, route)
        return peer

    def _take_requests(self, peer: _Peer, bodies: list[tuple[int, bytes]]) -> None:
        if peer.state is LinkState.CLOSED:
            self._drop_peer(peer)
        for seq, body in bodies:
            if seq == 0:
                peer.refuse_client("a gauge is not a request")
                continue
            try:
                peer.requests.append((seq, _requests.decode(body, FRAME_BYTES_MAX)))
            except WireError as error:
                peer.refuse_client(str(error))

    def _handle_requests(self, due: list[_Peer]) -> None:
        """Hand all waiting requests to the handler, except of peers that read no replies."""
        taken: list[tuple[_Peer, int, Request]] = []
        for peer in due:
            peer.flush()
            if not peer.replies:
                taken += [(peer, seq, request) for seq, request in peer.requests]
                peer.requests.clear()
        if not taken:
            return
        replies = self._handle_batch([(p.boot_id, r.id, r.body) for p, _, r in taken])
        for peer, _, _ in taken:
            self._held.pop(peer.boot_id, None)
        for (peer, seq, request), reply in zip(taken, replies, strict=True):
            if reply is None or peer.boot_id in self._held:
                self._held[peer.boot_id] = None
                peer.requests.append((seq, request))
            else:
                peer.replies.append(self._encode_reply(request.id, reply))
                peer.mark_processed(seq)
        for boot_id in self._held:
            self._links.wake_at(boot_id, now_ns() + RETRY_MS * MS)

    def _encode_reply(self, number: int, answer: bytes | RpcError) -> bytes:
        if isinstance(answer, RpcError):
            return _encode(Reply(number, b"", str(answer)))
        reply = _encode(Reply(number, answer))
        if len(reply) <= BODY_BYTES_MAX:
            return reply
        return _encode(Reply(number, b"", f"the reply of {len(answer)} bytes is too large"))

    def _send_due(self, due: list[_Peer]) -> None:
        for peer in due:
            peer.flush()
            for route, frame in self._links.poll_link(peer, now_ns()):
                self._socket.send(route, frame)

    def _judge_silence(self, now: int) -> None:
        """Drop peers whose lease ended; the socket must be empty, so that all they sent was read.

        Messages and this process's own pauses only extend leases, and a new peer has a whole lease:
        so no peer needs a look before the first of the present leases can end.
        """
        if now - self._looked_ns > self._lease_ns // 3:
            self._grace_from_ns = now
        self._looked_ns = now
        if now <= self._next_look_ns:
            return
        self._next_look_ns = now + self._lease_ns
        for peer in self._links:
            heard_ns = max(self._links.heard_ns[peer.boot_id], self._grace_from_ns)
            if now - heard_ns > self._lease_ns:
                self._drop_peer(peer)
            else:
                self._next_look_ns = min(self._next_look_ns, heard_ns + self._lease_ns)

    def _drop_peer(self, peer: _Peer) -> None:
        self._links.drop_link(peer.boot_id)
        self._held.pop(peer.boot_id, None)
        self._on_peer_lost(peer.boot_id)

    def _end_serving(self, error: Exception | None) -> None:
        self._socket.close(LINGER_MS)
        self._serving.mark_ended(error)
