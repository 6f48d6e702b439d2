"""Request and reply over a session: the client that awaits, the server that commits in groups.

Reads   requests of peers (server), replies (client)
Emits   requests (client); replies, and which processes were lost (server)

A server takes the requests of one turn together, so that a store makes them durable with one
commit; they are acknowledged and answered after it. A request may reach the handler again after a
restart of either side (the session makes it at least once, and what a dead server took without
answering is asked again), so handling must be idempotent. A handler that raises ends the server,
`wait_closed` raises what it raised, and nothing of that turn is acknowledged or answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from laminar.net.client import FLUSH_S, LINGER_MS, ClientShell, now_ns, started
from laminar.net.descriptors import clients_allowed
from laminar.net.frames import (
    BAD_BYTES,
    FRAME_BYTES_MAX,
    Hello,
    Refused,
    WireError,
    decode_client,
    encode,
)
from laminar.net.session import (
    MS,
    ClientLink,
    Limits,
    LinkClosed,
    LinkState,
    OutboxFull,
    ServerLink,
    full,
)
from laminar.net.transport import DRAIN_FRAMES, ServerSocket
from laminar.net.wakeups import Wakeups

RETRY_MS = 250
"""Before a request that could not be handled yet is handed over again."""


class RpcError(RuntimeError):
    """The server handled the request and says no; the sentence is the server's."""


class Request(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    id: int  #: counts from 1 in each client process
    body: bytes


class Reply(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    id: int
    body: bytes
    error: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


class _Call(msgspec.Struct, eq=False):
    """A request without its reply yet."""

    body: bytes  #: the encoded Request
    reply: asyncio.Future[bytes]
    seq: int = 0  #: its number on the link; 0 before it is queued


class RpcClient:
    """Requests to one server, many at a time, each awaited by its caller."""

    def __init__(
        self,
        find_address: Callable[[], str | None],
        name: str,
        role: str,
        boot_id: str,
        *,
        server: str,
        heartbeat_ms: int,
        max_message: int = FRAME_BYTES_MAX,
    ) -> None:
        """`find_address`: asked until it knows one, and again when the server is silent.
        `server`: what error messages call the other side."""
        self._find_address = find_address
        self._server = server
        self._heartbeat_ms = heartbeat_ms
        self._link = ClientLink(
            name,
            role,
            boot_id,
            heartbeat_ns=heartbeat_ms * MS,
            now_ns=now_ns(),
            limits=Limits(max_frame=max_message),
        )
        self._shell: ClientShell | None = None
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._server_boot = ""
        self._again: deque[int] = deque()  #: requests that a former server took and never answered

    async def start(self) -> None:
        """Begin to look for the server and to join it; does not wait for either."""
        self._shell = ClientShell(
            self._link, self._find_address, self._heartbeat_ms, self._answered, self._notice
        )
        self._shell.closed.add_done_callback(self._ended)

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        """The reply. Waits while the outbox is full.

        Raises RpcError (the server says no), TimeoutError, LinkClosed (refused, closed, failed),
        ValueError (`body` exceeds max_message). After a timeout the request may still be handled.
        """
        shell = started(self._shell)
        self._last_id += 1
        number, started_ns = self._last_id, now_ns()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call = self._calls[number] = _Call(_encode(Request(number, body)), future)
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue(shell, call)
                return await call.reply
        except TimeoutError as error:
            raise TimeoutError(self._overdue(shell, number, body, started_ns)) from error
        finally:
            del self._calls[number]

    async def close(self, flush_s: float = FLUSH_S) -> None:
        """Wait at most `flush_s` for acknowledgements, say Bye; open calls raise LinkClosed."""
        if self._shell is not None:
            await self._shell.close(flush_s)

    async def _queue(self, shell: ClientShell, call: _Call) -> None:
        while True:
            try:
                call.seq = self._link.send(call.body)
                shell.flush_soon()
                return
            except OutboxFull:
                shell.turned.clear()
                await shell.turned.wait()

    def _answered(self, body: bytes) -> None:
        reply = _decode_reply(body)
        call = self._calls.get(reply.id)
        if call is None or call.reply.done():
            return
        if reply.error is None:
            call.reply.set_result(reply.body)
        else:
            call.reply.set_exception(RpcError(reply.error))

    def _notice(self) -> None:
        if self._link.state is LinkState.REFUSED:
            self._fail(f"the {self._server} refused {self._link.name}: {self._link.reason}")
        if self._link.server_boot != self._server_boot:
            self._server_boot = self._link.server_boot
            taken = self._link.outbox.first
            self._again.extend(n for n, call in self._calls.items() if 0 < call.seq < taken)
        self._ask_again()

    def _ask_again(self) -> None:
        """A server that died between its acknowledgement and its reply left these open."""
        while self._again:
            call = self._calls.get(self._again[0])
            try:
                if call is not None and not call.reply.done():
                    call.seq = self._link.send(call.body)
                    started(self._shell).flush_soon()
            except OutboxFull:
                return
            self._again.popleft()

    def _ended(self, closed: asyncio.Future[None]) -> None:
        error = closed.exception()
        self._fail(f"the link to the {self._server} failed: {error}" if error else "")

    def _fail(self, reason: str) -> None:
        for call in self._calls.values():
            if call.seq and not call.reply.done():
                call.reply.set_exception(
                    LinkClosed(reason or f"the link to the {self._server} is closed")
                )

    def _overdue(self, shell: ClientShell, number: int, body: bytes, started_ns: int) -> str:
        now = now_ns()
        return (
            f"the {self._server} at {shell.address or 'an unknown address'} did not answer "
            f"request {number} ({len(body)} bytes) of {self._link.name} within "
            f"{(now - started_ns) / 1e9:.1f} s; it was last heard "
            f"{self._link.silent_ns(now) / 1e9:.1f} s ago"
        )


_Key = tuple[str, str]  #: name and boot id of a peer


class _Peer:
    """One client of an RpcServer."""

    def __init__(self, link: ServerLink, route: bytes) -> None:
        self.key = (link.name, link.boot_id)
        self.link = link
        self.route = route  #: routing id of its newest connection
        self.requests: deque[tuple[int, Request]] = deque()  #: (number on the link, request)
        self.replies: deque[bytes] = deque()  #: that its outbox had no room for

    def flush(self) -> None:
        """Queue replies while there is room; a refused client gets none."""
        while self.replies and self.link.state is LinkState.UP:
            try:
                self.link.send(self.replies[0])
            except OutboxFull:
                return
            self.replies.popleft()


Batch = list[tuple[str, int, bytes]]  #: (boot id of the peer, request id, body)


class RpcServer:
    """Answers requests: one call of the handler per turn, with all that arrived in it."""

    def __init__(
        self,
        host: str,
        port: int,
        handle_batch: Callable[[Batch], list[bytes | RpcError | None]],
        *,
        boot_id: str,
        lease_ms: int,
        on_peer_lost: Callable[[str], None],
        max_message: int = FRAME_BYTES_MAX,
    ) -> None:
        """`handle_batch`: one reply per request, in order; when it returns, all are durable. None
        for one that cannot be handled yet: it comes again, and with it all later ones of its peer.
        `on_peer_lost(boot_id)`: that process said Bye, or was silent for `lease_ms`.
        """
        self._socket = ServerSocket(host, port, max_message)
        self._limits = Limits(max_frame=max_message)
        self._handle_batch = handle_batch
        self._boot_id = boot_id
        self._lease_ns = lease_ms * MS
        self._on_peer_lost = on_peer_lost
        self._peers: dict[_Key, _Peer] = {}  #: by name and boot id
        self._routes: dict[bytes, _Peer] = {}
        self._awake: dict[_Key, None] = {}  #: peers that this turn is about
        self._wakeups = Wakeups[_Key]()  #: of peers whose link has something to resend
        self._peers_max = clients_allowed()
        self._links_made = 0
        self._judged_ns = now_ns()
        self._nobody_until_ns = (
            self._judged_ns + self._lease_ns
        )  #: no lease of the present peers ends before
        self._closed: asyncio.Future[None] | None = None
        self.bad_frames = 0

    @property
    def address(self) -> str:
        """tcp://host:port"""
        return self._socket.address

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        self._socket.attach(loop, self._turn)

    async def wait_closed(self) -> None:
        """Return after `close`; raise what the handler or a callback raised."""
        if self._closed is None:
            raise RuntimeError("call start() first, in a running event loop")
        await asyncio.shield(self._closed)

    async def close(self) -> None:
        """Stop listening; what is not handled yet is asked again of the next server."""
        self._end(None)

    def _turn(self) -> None:
        try:
            frames = self._socket.drain()
            for route, frame in frames:
                self._take(route, frame, now_ns())
            self._awake.update(dict.fromkeys(self._wakeups.due(now_ns())))
            self._serve()
            self._send_due()
            self._awake.clear()
            if len(frames) < DRAIN_FRAMES:
                self._judge_silence(now_ns())
        except Exception as error:
            self._end(error)

    def _take(self, route: bytes, frame: bytes, now: int) -> None:
        peer = self._routes.get(route)
        try:
            if peer is None:
                peer = self._introduce(route, frame, now)
            else:
                self._take_requests(peer, peer.link.receive(frame, now))
        except WireError:
            self.bad_frames += 1
        if peer is not None:
            self._awake[peer.key] = None

    def _introduce(self, route: bytes, frame: bytes, now: int) -> _Peer | None:
        """A new connection: of a new client, or of one that we know and that reconnected."""
        hello = decode_client(frame, self._limits.max_frame)
        if not isinstance(hello, Hello):
            return None  # from before our start: its sender will say Hello when nobody answers
        peer = self._peers.get((hello.name, hello.boot_id))
        if peer is None and len(self._peers) >= self._peers_max:
            self._socket.send(route, encode(Refused(full(self._peers_max))))
            return None
        if peer is None:
            peer = self._peers[hello.name, hello.boot_id] = self._admit(hello, route, now)
        else:
            peer.link.receive(frame, now)
            del self._routes[peer.route]
        peer.route = route
        self._routes[route] = peer
        return peer

    def _admit(self, hello: Hello, route: bytes, now: int) -> _Peer:
        self._links_made += 1
        link = ServerLink(
            hello,
            server_boot=f"{self._boot_id}.{self._links_made}",
            incarnation=hello.incarnation,
            now_ns=now,
            limits=self._limits,
        )
        return _Peer(link, route)

    def _take_requests(self, peer: _Peer, bodies: list[tuple[int, bytes]]) -> None:
        if peer.link.state is LinkState.CLOSED:
            self._drop(peer)
        for seq, body in bodies:
            if seq == 0:
                peer.link.refuse("a gauge is not a request")
                continue
            try:
                peer.requests.append((seq, _decode_request(body)))
            except BAD_BYTES as error:
                peer.link.refuse(f"a message is not a request: {error}")

    def _serve(self) -> None:
        """Hand all waiting requests to the handler, but none of a peer that does not read."""
        taken: list[tuple[_Peer, int, Request]] = []
        for peer in self._present(self._awake):
            peer.flush()
            if not peer.replies:
                taken += [(peer, seq, request) for seq, request in peer.requests]
                peer.requests.clear()
        if not taken:
            return
        replies = self._handle_batch([(p.link.boot_id, r.id, r.body) for p, _, r in taken])
        held: dict[_Key, None] = {}
        for (peer, seq, request), reply in zip(taken, replies, strict=True):
            if reply is None or peer.key in held:
                held[peer.key] = None
                peer.requests.append((seq, request))
            else:
                peer.replies.append(self._reply(request.id, reply))
                peer.link.processed(seq)
        for key in held:
            self._wakeups.wake(key, now_ns() + RETRY_MS * MS)

    def _reply(self, number: int, answer: bytes | RpcError) -> bytes:
        if isinstance(answer, RpcError):
            return _encode(Reply(number, b"", str(answer)))
        reply = _encode(Reply(number, answer))
        if len(reply) <= self._limits.max_body:
            return reply
        return _encode(Reply(number, b"", f"the reply of {len(answer)} bytes is too large"))

    def _send_due(self) -> None:
        for peer in self._present(self._awake):
            peer.flush()
            for frame in peer.link.poll(now_ns()):
                self._socket.send(peer.route, frame)
            self._wakeups.wake(peer.key, peer.link.next_due_ns())

    def _present(self, keys: Iterable[_Key]) -> list[_Peer]:
        return [self._peers[key] for key in keys if key in self._peers]

    def _judge_silence(self, now: int) -> None:
        """Called when the socket was seen empty: what a peer said by now was heard.

        Words and pardons only move the end of a lease away, and who connects has a whole one
        before it: so nobody is looked at before the first of the present leases can have ended.
        """
        paused = now - self._judged_ns > self._lease_ns // 3
        self._judged_ns = now
        if not paused and now <= self._nobody_until_ns:
            return
        self._nobody_until_ns = now + self._lease_ns
        for peer in list(self._peers.values()):
            if paused:
                peer.link.pardon(now)
                continue
            silent_ns = peer.link.silent_ns(now)
            if silent_ns > self._lease_ns:
                self._drop(peer)
            else:
                self._nobody_until_ns = min(self._nobody_until_ns, now - silent_ns + self._lease_ns)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.key]
        del self._routes[peer.route]
        self._on_peer_lost(peer.link.boot_id)

    def _end(self, error: Exception | None) -> None:
        self._socket.close(LINGER_MS)
        if self._closed is None or self._closed.done():
            return
        if error is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(error)
