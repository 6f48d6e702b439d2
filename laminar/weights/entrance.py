"""The side of a relay where its predecessor connects.

Reads   connections; what strangers and the predecessor send
Emits   Welcome and Refused; NeighbourUp, NeighbourDown, Trouble

Anyone who can reach the port may connect, so a stranger gets little: few connections, a short
time, one small message that must name this run. (Who listens on the network learns the name of the
run; secrecy is not provided here.) There is one predecessor. Orders of the coordinator are
numbered, and the highest number wins: a relay that was taken out of the chain, and does not know
it yet, cannot push the right one away.
"""

from __future__ import annotations

import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar.weights import wire
from laminar.weights.receiver import Receiver
from laminar.weights.reports import NeighbourDown, NeighbourUp, Report, Side, Trouble
from laminar.weights.stock import Stock
from laminar.weights.transport import Connection, listen, tune
from laminar.weights.wire import BadBytes, FromPredecessor, Header, Hello, Refused, Welcome

STRANGERS_MAX = 8
GREETING_S = 5.0
"""For connecting and saying hello; both sides."""

Readiness = tuple[int, int, Callable[[int], None]]  #: descriptor, poll events, what to do then


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a relay is."""

    run: str  #: names the run; a relay of another run is refused
    name: str
    incarnation: int


class _Stranger:
    """Handler of a connection that has not said hello."""

    def __init__(self, greet: Callable[[Hello], None]) -> None:
        self._greet = greet
        self.until = time.monotonic() + GREETING_S

    def message(self, message: FromPredecessor) -> None:
        if not isinstance(message, Hello):
            raise BadBytes("no-hello", type(message).__name__)
        self._greet(message)

    def place(self, header: Header) -> memoryview:
        raise BadBytes("no-hello", f"{header}")

    def landed(self, header: Header) -> None:
        raise AssertionError(header)


class Entrance:
    """Listener, strangers, and the one predecessor."""

    def __init__(
        self, identity: Identity, stock: Stock, receiver: Receiver, emit: Callable[[Report], None]
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.bytes_in = self.bytes_out = 0  #: of predecessors that are gone
        self.predecessor: Connection[FromPredecessor] | None = None
        self.peer = ""
        self._chain = 0
        self._identity, self._stock, self._receiver, self._emit = identity, stock, receiver, emit
        self._strangers: dict[Connection[FromPredecessor], _Stranger] = {}
        self._listener: socket.socket | None = None

    def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address that predecessors connect to. OSError if it cannot be had."""
        self._listener = listen(host, port)
        address = self._listener.getsockname()
        return address[0], address[1]

    def close(self) -> None:
        for connection in (*self._strangers, self.predecessor):
            if connection is not None:
                connection.close()
        if self._listener is not None:
            self._listener.close()

    # --- one turn -----------------------------------------------------------------------------

    def readiness(self) -> Iterator[Readiness]:
        """What to wait for, and what to do then."""
        if self._listener is not None:
            yield self._listener.fileno(), select.POLLIN, lambda events: self._accept()
        for connection in self._connections():
            yield connection.fileno(), connection.interest(), self._moving(connection)

    def flush(self) -> None:
        if self.predecessor is not None and not self.predecessor.idle:
            self._move(self.predecessor, 0)

    def tick(self, now: float) -> None:
        """Send strangers away that say nothing."""
        late = [c for c, stranger in self._strangers.items() if now >= stranger.until]
        for connection in late:
            self._end(connection, BadBytes("no-hello", "nothing in time"))

    def _connections(self) -> list[Connection[FromPredecessor]]:
        predecessor = [] if self.predecessor is None else [self.predecessor]
        return [*self._strangers, *predecessor]

    def _moving(self, connection: Connection[FromPredecessor]) -> Callable[[int], None]:
        return lambda events: self._move(connection, events)

    def _move(self, connection: Connection[FromPredecessor], events: int) -> None:
        if connection is not self.predecessor and connection not in self._strangers:
            return  # displaced earlier in this turn
        try:
            if events & ~select.POLLOUT:
                connection.read()
            connection.flush()
        except (BadBytes, OSError) as error:
            self._end(connection, error)

    # --- connections --------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it was gone again, or there are no descriptors: the next turn tries anew
        if len(self._strangers) >= STRANGERS_MAX:
            self.refused["too-many"] += 1
            sock.close()
            return
        sock.setblocking(False)
        tune(sock)
        stranger = _Stranger(lambda hello: self._greet(connection, hello))
        connection = Connection(sock, wire.predecessor_decoder, stranger)
        self._strangers[connection] = stranger

    def _greet(self, connection: Connection[FromPredecessor], hello: Hello) -> None:
        if hello.run != self._identity.run:
            raise self._refusal(connection, "other-run", f"this relay is not of run {hello.run}")
        if hello.chain < self._chain:
            detail = f"chain {hello.chain} is over, the present one is {self._chain}"
            raise self._refusal(connection, "old-chain", detail)
        if self.predecessor is not None:
            self._end(self.predecessor, ConnectionAbortedError(f"{hello.name} took its place"))
        del self._strangers[connection]
        self._chain, self.predecessor, self.peer = hello.chain, connection, hello.name
        connection.handler = self._receiver
        connection.message_bytes_max = wire.MESSAGE_BYTES_MAX
        connection.send(
            Welcome(
                name=self._identity.name,
                incarnation=self._identity.incarnation,
                held=self._stock.complete(),
                partial=self._stock.partial(),
            )
        )
        self._receiver.connected(
            connection,
            hello.name,
            lambda reason: self._end(connection, ConnectionAbortedError(reason)),
        )
        self._emit(NeighbourUp(Side.PREDECESSOR, hello.name, hello.incarnation))

    def _refusal(
        self, connection: Connection[FromPredecessor], reason: str, detail: str
    ) -> BadBytes:
        connection.send(Refused(reason=detail))
        return BadBytes(reason, detail)

    def _end(self, connection: Connection[FromPredecessor], error: BadBytes | OSError) -> None:
        if isinstance(error, BadBytes):
            self.refused[error.reason] += 1
            self._say_goodbye(connection)
        connection.close()
        if self._strangers.pop(connection, None) is not None:
            return
        self.predecessor = None
        self.bytes_in += connection.bytes_in
        self.bytes_out += connection.bytes_out
        peer, self.peer = self.peer, ""
        self._receiver.disconnected()
        if isinstance(error, BadBytes):
            self._emit(Trouble(error.reason, -1, peer, str(error)))
        self._emit(NeighbourDown(Side.PREDECESSOR, peer, str(error)))

    def _say_goodbye(self, connection: Connection[FromPredecessor]) -> None:
        """Send the reason of a refusal, if the kernel takes it."""
        try:
            connection.flush()
        except (BadBytes, OSError):
            pass
