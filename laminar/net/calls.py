"""The two ends of requests between processes, as the code that uses them sees them.

Reads   nothing
Gives   Client and Server, the two ends; Serving, the time of a server; Request, Reply, RpcError,
        Batch, Handler, FLUSH_S

The sockets under it are in net/rpc_client.py and net/rpc_server.py; an actor's logic loads none.
The simulator has two ends of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

FLUSH_S = 2.0  #: how long a client that closes waits for acknowledgements

Batch = list[tuple[str, int, bytes]]  #: (boot id of the peer, request id, body)


class RpcError(RuntimeError):
    """The server handled the request and refuses it; the text is the server's."""


class Request(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    id: int  #: counts from 1 in each client process
    body: bytes


class Reply(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    id: int
    body: bytes
    error: str | None = None


Handler = Callable[[Batch], list[bytes | RpcError | None]]
"""One reply per request, in order; when it returns, all are durable. None for one that cannot be
handled yet: it comes again, and with it all later ones of its peer."""


class Client(Protocol):
    """Requests to one server, many at a time."""

    async def start(self) -> None:
        """Begin to look for the server; does not wait for it."""

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        """The reply. RpcError: the server says no. TimeoutError: the request may still be handled.
        LinkClosed: refused, closed or failed."""
        ...

    async def close(self, flush_s: float = FLUSH_S) -> None:
        """Wait at most `flush_s` for acknowledgements; open calls raise LinkClosed."""


class Server(Protocol):
    """Answers requests: one call of the handler with all that arrived together."""

    @property
    def address(self) -> str:
        """Where others reach it."""
        ...

    async def start(self) -> None:
        """Take requests from now on."""

    def retry_held(self) -> None:
        """What the handler could not handle yet is handed over to it now."""

    async def wait_closed(self) -> None:
        """Return after `close`; raise what the handler or a callback raised."""

    async def close(self) -> None:
        """Take no more; what is not handled yet is asked again of the next server."""


class ServingState:
    """The time in which a server serves: from its start to its close, or to what failed."""

    def __init__(self) -> None:
        self._closed: asyncio.Future[None] | None = None

    def mark_started(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closed = loop.create_future()

    def __bool__(self) -> bool:
        """Whether it serves now."""
        return self._closed is not None and not self._closed.done()

    def mark_ended(self, error: Exception | None) -> None:
        """`error`: what failed. Only the first end counts."""
        if self._closed is None or self._closed.done():
            return
        if error is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(error)

    async def wait_closed(self) -> None:
        if self._closed is None:
            raise RuntimeError("call start() first, in a running event loop")
        await asyncio.shield(self._closed)
