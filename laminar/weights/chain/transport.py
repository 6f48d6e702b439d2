"""What a relay needs of a network: frames to and from its two neighbours.

Gives   Transport, FrameHandler; Link, Listener, Network; READABLE and WRITABLE

TCP is the one that there is (tcp.py); the simulator delivers frames in virtual time. A link that
has ended raises OSError, one whose neighbour sent what it must not send raises BadBytes.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from laminar.weights.arena.region import Region
from laminar.weights.chain import wire
from laminar.weights.chain.wire import Header

READABLE, WRITABLE = 1, 4
"""Bits of what a link waits for, or is ready for; those of poll(). Any other bit is an error, which
a read will tell."""

Taken = TypeVar("Taken", contravariant=True)


class Transport(Protocol):
    """One neighbour, as those see it who decide what to send.

    TCP needs nothing but the bytes; a transport that writes into the successor's memory finds its
    place there from the header.
    """

    @property
    def idle(self) -> bool:
        """Everything sent and pushed so far was handed over: more can be pushed."""

    def send(self, message: wire.FromPredecessor | wire.FromSuccessor) -> None:
        """Queue a message."""

    def push(self, header: Header, body: Region) -> None:
        """Queue a chunk or block; it must not change until the neighbour is known to have it."""


class FrameHandler(Protocol[Taken]):
    """The receiver of what arrives; may raise BadBytes, which ends the connection."""

    def handle_message(self, message: Taken) -> None: ...

    def get_buffer(self, header: Header) -> memoryview:
        """Where the body of this chunk or block goes; exactly header.length bytes."""

    def handle_body(self, header: Header) -> None:
        """The body is there."""


class Endpoint(Protocol):
    """What can become ready."""

    def fileno(self) -> int:
        """A number of its own, to wait for it."""

    def close(self) -> None: ...


class Link(Transport, Endpoint, Protocol):
    """A connection to one neighbour."""

    handler: FrameHandler[Any]
    decoder: Any  #: of what the other side says; another one once it fetches
    message_bytes_max: int  #: of a message that arrives; raised once the neighbour is known
    bytes_in: int
    bytes_out: int
    moved_at: float  #: by the clock of the network, when bytes last came or went

    def get_interest(self) -> int:
        """What to wait for: READABLE, WRITABLE or both."""

    def finish_connect(self) -> None:
        """The connection is writable for the first time; OSError if it could not be made."""

    def read(self) -> None:
        """Give what has arrived to the handler."""

    def flush(self) -> None:
        """Hand over what can be handed over now."""


class Listener(Endpoint, Protocol):
    """Where predecessors connect."""

    address: tuple[str, int]  #: numeric host, port

    def accept(self, handler: FrameHandler[wire.FromPredecessor]) -> Link | None:
        """The next connection; None if it is gone again."""


class Network(Protocol):
    """Makes listeners and links."""

    def listen(self, host: str, port: int) -> Listener:
        """OSError if the address cannot be had."""

    def connect(
        self, host: str, port: int, source: str, handler: FrameHandler[wire.FromSuccessor]
    ) -> Link:
        """Begin to connect from address `source`; writable when that is decided. OSError."""
