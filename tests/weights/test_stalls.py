"""A successor that is reached, but gets nothing: its relay counts the connections that stall."""

from __future__ import annotations

from typing import Any

from laminar.weights.chain import wire
from laminar.weights.chain.downstream import Downstream, Successor
from laminar.weights.chain.reports import Report, Trouble
from laminar.weights.chain.transport import READABLE, WRITABLE
from laminar.weights.chain.upstream import HANDSHAKE_TIMEOUT_S, RelayIdentity
from laminar.weights.version.copy import pack_have

ME = RelayIdentity(run="run", name="relay-0", incarnation=1, key=b"k" * 32)


class Parts:
    """The sender, the network and the connection of a hop."""

    idle, current = True, None
    error: OSError = TimeoutError(110, "Connection timed out")

    def connect(self, *_: Any) -> Parts:
        return self

    def read(self) -> None:
        raise self.error

    def get_interest(self) -> int:
        return READABLE

    def ignore(self, *_: Any) -> None: ...

    finish_connect = close = flush = send = detach_link = handle_message = ignore


class Hop:
    """The side of relay-0, in a time that the test moves."""

    def __init__(self) -> None:
        self.now, self.reports, self.parts = 0.0, list[Report](), Parts()
        parts: Any = (ME, self.parts, self.parts, lambda: self.now, lambda: b"n" * 16)
        self.downstream = Downstream(*parts, self.reports.append)
        self.downstream.set_successor(Successor("relay-1", "10.0.0.1", 1, chain=7))

    def dial(self) -> None:
        self.now += 2.0
        self.downstream.check_timers(self.now)

    def handle(self, events: int) -> None:
        ((_, _, act),) = self.downstream.iter_poll_entries()
        act(events)

    def stall(self, *messages: Any) -> None:
        """Connect, hear these messages, and get no acknowledgement any more."""
        self.dial()
        self.handle(WRITABLE)
        self.downstream.welcomed = True
        for message in messages:
            self.downstream.handle_message(message)
        self.handle(READABLE)

    def wait(self) -> None:
        self.now += HANDSHAKE_TIMEOUT_S
        self.downstream.check_timers(self.now)

    def counts(self) -> list[int]:
        return [r.stalls for r in self.reports if isinstance(r, Trouble) and r.kind == "stalled"]


def want(chunks: int) -> wire.Want:
    have = bytearray(b"\1" * chunks + bytes(16 - chunks))
    return wire.Want(offer=1, have=pack_have(have), from_block=None)


def test_connections_that_stall_are_counted_until_something_arrives() -> None:
    hop = Hop()
    hop.stall()
    hop.stall(want(0))
    hop.stall(want(4))
    hop.stall(want(4))
    hop.stall(want(4), wire.VersionDone(version=1, digest="d"))
    assert hop.counts() == [1, 2, 1, 2, 1]


def test_a_successor_that_accepts_and_never_reads_stalls() -> None:
    hop = Hop()
    for _ in range(3):
        hop.dial()
        hop.handle(WRITABLE)
        hop.wait()
    assert hop.counts() == [1, 2, 3]


def test_a_successor_that_is_not_reached_or_that_ended_does_not_stall() -> None:
    hop = Hop()
    for _ in range(3):
        hop.dial()
        hop.wait()
    hop.parts.error = ConnectionResetError("the other side closed the connection")
    hop.stall()
    assert hop.counts() == []
