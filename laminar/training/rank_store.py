"""The rendezvous of the ranks: a table of keys on rank 0, which the others reach by messages.

Gives   StoreTable, of rank 0; StoreRequest and StoreReply, with which RankStore (ranks.py) of
        another rank reaches it; StoreForward, on the way

torch's own stores need a port, which has no authentication, or a file with locks, which a network
file system may not have. These requests travel with the orders of the ranks. Without torch, which
the host of another node's ranks does not import.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import msgspec


class StoreRequest(msgspec.Struct, tag="store", frozen=True, kw_only=True):
    """A request of a rank to the table."""

    rank: int
    number: int  #: of the rank's requests
    action: Literal["set", "get", "add", "check"]
    keys: tuple[str, ...]
    value: bytes = b""

    def make_reply(self, value: bytes) -> StoreReply:
        return StoreReply(rank=self.rank, number=self.number, value=value)


class StoreReply(msgspec.Struct, tag="stored", frozen=True, kw_only=True):
    """The reply to the request of this number."""

    rank: int
    number: int
    value: bytes


Submit = Callable[[StoreRequest], "Future[bytes]"]
"""Sends a request from any thread; the future has the value once it is known."""


class StoreForward:
    """Requests on their way to the table of another process."""

    def __init__(self, send: Callable[[StoreRequest], object]) -> None:
        """`send`: sends a request, in the event loop in which this is made."""
        self._send, self._loop = send, asyncio.get_running_loop()
        self._waiting: dict[tuple[int, int], Future[bytes]] = {}

    def submit(self, request: StoreRequest) -> Future[bytes]:
        """Send a request from any thread; see Submit."""
        found = self._waiting[request.rank, request.number] = Future()
        self._loop.call_soon_threadsafe(self._send, request)
        return found

    def handle_reply(self, reply: StoreReply) -> None:
        self._waiting.pop((reply.rank, reply.number)).set_result(reply.value)


class StoreTable:
    """The keys and values of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Future[bytes]]] = {}

    def submit(self, request: StoreRequest) -> Future[bytes]:
        """Carry out a request; the future of a missing key waits until it is set."""
        found: Future[bytes] = Future()
        key = request.keys[0]
        with self._lock:
            if request.action == "check":
                found.set_result(b"1" * all(key in self._values for key in request.keys))
            elif request.action == "get":
                if key in self._values:
                    found.set_result(self._values[key])
                else:
                    self._waiting.setdefault(key, []).append(found)
            else:
                value = request.value
                if request.action == "add":
                    value = b"%d" % (int(self._values.get(key, b"0")) + int(value))
                self._values[key] = value
                found.set_result(value)
                for waiting in self._waiting.pop(key, ()):
                    waiting.set_result(value)
        return found
