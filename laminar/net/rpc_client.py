"""The client end of request and reply over a session: each request is awaited by its caller.

Reads   replies
Emits   requests
Raises  RpcError, TimeoutError, LinkClosed

A request may be handled twice after a restart of either side: the session delivers at least once,
and requests that a server acknowledged but never answered are sent again to its successor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from laminar.net.auth import RunKeys
from laminar.net.calls import FLUSH_S, Reply, Request, RpcError
from laminar.net.client import ClientShell, now_ns, require_started
from laminar.net.session import MS, ClientLink, LinkClosed, LinkState, OutboxFull

_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


class _Call(msgspec.Struct, eq=False):
    """A request without a reply so far."""

    body: bytes  #: the encoded Request
    reply: asyncio.Future[bytes]
    seq: int = 0  #: its number on the link; 0 before it is queued


class RpcClient:
    """Concurrent requests to one server, each awaited by its caller."""

    def __init__(
        self,
        find_address: Callable[[], str | None],
        name: str,
        role: str,
        boot_id: str,
        *,
        server: str,
        heartbeat_ms: int,
        keys: RunKeys,
        on_trouble: Callable[[str], None],
    ) -> None:
        """Create a client that is not started.

        `find_address`: called until it returns an address, and again when the server is silent.
        `server`: its name in error messages. `on_trouble`: called with a reason if the server
        refuses this process.
        """
        self._keys, self._on_trouble = keys, on_trouble
        self._find_address = find_address
        self._server = server
        self._heartbeat_ms = heartbeat_ms
        self._link = ClientLink(
            name, role, boot_id, heartbeat_ns=heartbeat_ms * MS, now_ns=now_ns()
        )
        self._shell: ClientShell | None = None
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._server_boot = ""
        self._again: deque[int] = deque()  #: requests that a former server never answered

    async def start(self) -> None:
        """Start to look for the server and to join it, without waiting for either."""
        self._shell = ClientShell(
            self._link,
            self._find_address,
            self._heartbeat_ms,
            self._handle_reply,
            self._handle_link_state,
            self._keys,
            self._on_trouble,
            lambda: self._link.inbox.delivered if self._calls else None,
        )
        self._shell.closed.add_done_callback(self._handle_closed)

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        """Send a request and return the reply; wait while the outbox is full.

        Raises RpcError (the server refuses it), TimeoutError, LinkClosed (refused, closed, failed),
        ValueError (`body` exceeds a frame). After a timeout the request may still be handled.
        """
        shell = require_started(self._shell)
        self._last_id += 1
        number, started_ns = self._last_id, now_ns()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call = self._calls[number] = _Call(_encode(Request(number, body)), future)
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue_call(shell, call)
                return await call.reply
        except TimeoutError as error:
            raise TimeoutError(self._describe_timeout(shell, number, body, started_ns)) from error
        finally:
            del self._calls[number]

    async def close(self, flush_s: float = FLUSH_S) -> None:
        """Wait at most `flush_s` for acknowledgements, say Bye; open calls raise LinkClosed."""
        if self._shell is not None:
            await self._shell.close(flush_s)

    async def _queue_call(self, shell: ClientShell, call: _Call) -> None:
        while True:
            try:
                call.seq = self._link.send(call.body)
                shell.flush_soon()
                return
            except OutboxFull:
                shell.turned.clear()
                await shell.turned.wait()

    def _handle_reply(self, body: bytes) -> None:
        reply = _decode_reply(body)
        call = self._calls.get(reply.id)
        if call is None or call.reply.done():
            return
        if reply.error is None:
            call.reply.set_result(reply.body)
        else:
            call.reply.set_exception(RpcError(reply.error))

    def _handle_link_state(self) -> None:
        if self._link.state is LinkState.REFUSED:
            self._fail_calls(f"the {self._server} refused {self._link.name}: {self._link.reason}")
        if self._link.server_boot != self._server_boot:
            self._server_boot = self._link.server_boot
            taken = self._link.outbox.first
            self._again.extend(n for n, call in self._calls.items() if 0 < call.seq < taken)
        self._resend_calls()

    def _resend_calls(self) -> None:
        """Send requests again that a server acknowledged but died before answering."""
        while self._again:
            call = self._calls.get(self._again[0])
            try:
                if call is not None and not call.reply.done():
                    call.seq = self._link.send(call.body)
                    require_started(self._shell).flush_soon()
            except OutboxFull:
                return
            self._again.popleft()

    def _handle_closed(self, closed: asyncio.Future[None]) -> None:
        error = closed.exception()
        self._fail_calls(f"the link to the {self._server} failed: {error}" if error else "")

    def _fail_calls(self, reason: str) -> None:
        for call in self._calls.values():
            if call.seq and not call.reply.done():
                call.reply.set_exception(
                    LinkClosed(reason or f"the link to the {self._server} is closed")
                )

    def _describe_timeout(
        self, shell: ClientShell, number: int, body: bytes, started_ns: int
    ) -> str:
        now = now_ns()
        return (
            f"the {self._server} at {shell.address or 'an unknown address'} did not answer "
            f"request {number} ({len(body)} bytes) of {self._link.name} within "
            f"{(now - started_ns) / 1e9:.1f} s; its last message came "
            f"{self._link.silent_ns(now) / 1e9:.1f} s ago"
        )
