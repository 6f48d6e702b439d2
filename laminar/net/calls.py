"""The two ends of requests between processes, as protocols for the code that uses them.

Reads   nothing
Gives   Client and Server, the two ends; ServingState, the lifetime of a server; Request, Reply,
        RpcError, Batch, Handler, FLUSH_S

The sockets are in net/rpc_client.py and net/rpc_server.py; an actor's logic imports neither. The
simulator implements both ends itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from laminar.events.families import Item

FLUSH_S = 2.0  #: how long a closing client waits for acknowledgements

Batch = list[tuple[str, int, bytes]]  #: (boot id of the peer, request id, body)


class RpcError(RuntimeError):
    """A refusal by the server, which handled the request; the text is the server's."""


class Request(Item, frozen=True, gc=False):
    id: int  #: counts from 1 in each client process
    body: bytes


class Reply(Item, frozen=True, gc=False):
    id: int
    body: bytes
    error: str | None = None


Handler = Callable[[Batch], list[bytes | RpcError | None]]
"""Returns one reply per request, in order; all are durable on return.

None: not possible yet; the request and all later ones of its peer are held and retried.
"""


class Client(Protocol):
    """Concurrent requests to one server."""

    async def start(self) -> None:
        """Start to look for the server, without waiting for it."""

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        """Send a request and return the reply.

        RpcError: the server refused it. TimeoutError: the request may still be handled. LinkClosed:
        the link was refused, was closed or failed.
        """
        ...

    async def close(self, flush_s: float = FLUSH_S) -> None:
        """Wait at most `flush_s` for acknowledgements; open calls raise LinkClosed."""


class Server(Protocol):
    """A server that answers all requests that arrived together with one call of its handler."""

    @property
    def address(self) -> str:
        """The address at which other processes reach it."""
        ...

    async def start(self) -> None:
        """Start to accept requests."""

    def retry_held(self) -> None:
        """Hand held requests to the handler again now."""

    async def wait_closed(self) -> None:
        """Return after `close`; raise what the handler or a callback raised."""

    async def close(self) -> None:
        """Stop; clients repeat unhandled requests to the next server."""


class ServingState:
    """The lifetime of a server, from its start to its close or failure."""

    def __init__(self) -> None:
        self._closed: asyncio.Future[None] | None = None

    def mark_started(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closed = loop.create_future()

    def __bool__(self) -> bool:
        """Return whether the server is serving."""
        return self._closed is not None and not self._closed.done()

    def mark_ended(self, error: Exception | None) -> None:
        """End the lifetime, with the error that ended it, if any; only the first end counts."""
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
