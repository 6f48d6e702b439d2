"""Interface of a relay's network: frames to and from its two neighbours.

Gives   Transport, FrameHandler; Link, Listener, Network; READABLE and WRITABLE

TCP is the real implementation (tcp.py); the simulator delivers frames in virtual time. A link that
has ended raises OSError; a link whose neighbour broke the protocol raises BadBytes.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from laminar.weights.arena.region import Region
from laminar.weights.chain import wire
from laminar.weights.chain.wire import FrameHeader

READABLE, WRITABLE = 1, 4
"""Event bits of poll(). Any other bit is an error, which the next read reports."""

Taken = TypeVar("Taken", contravariant=True)


class Transport(Protocol):
    """A neighbour, as seen by the code that decides what to send.

    TCP needs only the bytes; a transport that writes into the successor's memory can derive the
    place from the header.
    """

    @property
    def idle(self) -> bool:
        """Whether everything queued was handed over, so that more can be pushed."""

    def send(self, message: wire.FromPredecessor | wire.FromSuccessor) -> None:
        """Queue a message."""

    def push(self, header: FrameHeader, body: Region) -> None:
        """Queue a chunk or block, which must not change until the neighbour confirms it."""


class FrameHandler(Protocol[Taken]):
    """A receiver of frames; may raise BadBytes, which ends the connection."""

    def handle_message(self, message: Taken) -> None: ...

    def get_buffer(self, header: FrameHeader) -> memoryview:
        """Return the buffer for the body of a chunk or block, of exactly header.length bytes."""

    def handle_body(self, header: FrameHeader) -> None:
        """Handle a body that has arrived completely."""


class Endpoint(Protocol):
    """An object that can be polled."""

    def fileno(self) -> int:
        """Return a unique number by which the endpoint is polled."""

    def close(self) -> None: ...


class Link(Transport, Endpoint, Protocol):
    """A connection to a neighbour."""

    handler: FrameHandler[Any]
    decoder: Any  #: decoder of the other side's messages; replaced if that side fetches
    message_bytes_max: int  #: limit of an incoming message; raised once the neighbour is known
    moved_at: float  #: time of the last byte in either direction, by the network's clock

    def get_interest(self) -> int:
        """Return the events to poll for: READABLE, WRITABLE or both."""

    def finish_connect(self) -> None:
        """Complete a connection attempt once it is writable; raise OSError if it failed."""

    def read(self) -> None:
        """Pass what has arrived to the handler."""

    def flush(self) -> None:
        """Send as much of the queue as possible now."""


class Listener(Endpoint, Protocol):
    """An endpoint to which predecessors connect."""

    address: tuple[str, int]  #: numeric host, port

    def accept(self, handler: FrameHandler[wire.FromPredecessor]) -> Link | None:
        """Accept the next connection; return None if it is gone again."""


class Network(Protocol):
    """A factory of listeners and links."""

    def listen(self, host: str, port: int) -> Listener:
        """Listen on an address; raise OSError if it is not available."""

    def connect(
        self, host: str, port: int, source: str, handler: FrameHandler[wire.FromSuccessor]
    ) -> Link:
        """Begin to connect from `source`; the link becomes writable at the outcome. OSError."""
