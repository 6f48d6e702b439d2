"""The successor side of a relay: it connects to the relay that it sends versions to.

Reads   the coordinator's order that names the successor; frames of the successor
Emits   Hello and Proof; NeighbourUp, NeighbourDown, Trouble

While the order stands, the connection is retried with pauses that grow to a second, so a restarted
successor is served again without any new order. A connection that was established, but passes
nothing large, or nothing that is read, ends by a timeout; such stalls are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar.weights.chain import wire
from laminar.weights.chain.handshake import PREDECESSOR, SUCCESSOR, compute_proof, verify_proof
from laminar.weights.chain.reports import NeighbourDown, NeighbourUp, Report, Side, Trouble
from laminar.weights.chain.sender import Sender
from laminar.weights.chain.transport import READABLE, WRITABLE, Link, Network
from laminar.weights.chain.upstream import HANDSHAKE_TIMEOUT_S, PollEntry, RelayIdentity
from laminar.weights.chain.wire import (
    BadBytes,
    ChainHello,
    ChainWelcome,
    Challenge,
    FrameHeader,
    FromSuccessor,
    PeerRefused,
    Proof,
    VersionDone,
    Want,
)

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
_FILLS_PER_TURN = 4
"""Maximum chunks passed to the kernel before the other sockets get their turn."""


@dataclass(frozen=True, slots=True)
class Successor:
    """The relay to send versions to."""

    name: str
    host: str  #: numeric
    port: int
    chain: int  #: number of the order


def send_hello(
    link: Link, me: RelayIdentity, chain: int, nonce: bytes, fetch: int | None = None
) -> ChainHello:
    """Send the first message of the connecting relay, and return it."""
    link.finish_connect()
    hello = ChainHello(
        run=me.run, name=me.name, incarnation=me.incarnation, chain=chain, nonce=nonce, fetch=fetch
    )
    link.send(hello)
    return hello


def answer_challenge(
    me: RelayIdentity, hello: ChainHello, name: str, challenge: Challenge
) -> Proof:
    """Build the proof for the relay `name`; raise BadBytes for another, or one without the key."""
    if challenge.name != name:
        raise BadBytes("other-relay", f"{challenge.name} has the address of {name}")
    if not verify_proof(me.key, SUCCESSOR, hello, challenge, challenge.proof):
        detail = f"the peer does not have the secret of run {hello.run}"
        raise BadBytes("other-secret", detail)
    return Proof(proof=compute_proof(me.key, PREDECESSOR, hello, challenge))


class Downstream:
    """The connection to the successor."""

    def __init__(
        self,
        identity: RelayIdentity,
        sender: Sender,
        network: Network,
        clock: Callable[[], float],
        nonce: Callable[[], bytes],
        emit: Callable[[Report], object],
    ) -> None:
        self.source = "0.0.0.0"  #: this relay's address
        self.connection: Link | None = None
        self.welcomed = False
        self._identity, self._sender, self._emit = identity, sender, emit
        self._network, self._clock, self._nonce = network, clock, nonce
        self._hello: ChainHello | None = None  #: message sent on this connection
        self._incarnation = 0  #: incarnation of the successor, once it has proved its run
        self._order: Successor | None = None
        self._connecting = False
        self._deadline = 0.0  #: time limit of the handshake, or time of the next retry
        self._pause = RETRY_S_MIN
        self._complained = False  #: trouble with this successor was reported
        self._stalls = 0  #: connections in a row that stalled, since the successor progressed
        self._chunks_there = 0  #: chunks that it had of the last wanted version

    @property
    def peer(self) -> str:
        """The name of the connected successor, or an empty string."""
        return self._order.name if self.welcomed and self._order is not None else ""

    def set_successor(self, order: Successor | None) -> None:
        """Send versions to this relay, or to none, from now on."""
        if order == self._order:
            return
        self.end_connection(ConnectionAbortedError("another successor was ordered"))
        self._order = order
        self._pause, self._deadline, self._complained = RETRY_S_MIN, 0.0, False
        self._stalls = 0

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()

    # --- one turn -----------------------------------------------------------------------------

    def iter_poll_entries(self) -> Iterator[PollEntry]:
        """Yield the connection to poll, with its interest and action."""
        if self.connection is None:
            return
        current = self._sender.current
        if self._connecting:
            interest = WRITABLE
        elif self.welcomed and current is not None and current.ready:
            interest = READABLE | WRITABLE
        else:
            interest = self.connection.get_interest()
        connection = self.connection
        yield connection, interest, lambda events: self._handle_events(connection, events)

    def flush(self) -> None:
        """Send what can be sent now."""
        if self.connection is None or self._connecting:
            return
        try:
            for _ in range(_FILLS_PER_TURN):
                self._sender.push_next()
                if self.connection is None or self.connection.idle:
                    return
                self.connection.flush()
                if not self.connection.idle:
                    return
        except (BadBytes, OSError) as error:
            self.end_connection(error)

    def check_timers(self, now: float) -> float | None:
        """Connect when it is time; return when to be called next, or None if nothing is due."""
        if self._order is None or self.welcomed:
            return None
        if now >= self._deadline:
            if self.connection is not None:
                self.end_connection(TimeoutError("no answer in time"))
            else:
                self._start_connect(self._order, now)
        return self._deadline

    def _handle_events(self, connection: Link, events: int) -> None:
        if connection is not self.connection:
            return
        try:
            if self._connecting:
                self._send_hello(connection)
            elif events & ~WRITABLE:
                connection.read()
        except (BadBytes, OSError) as error:
            if connection is self.connection:
                self.end_connection(error)

    # --- connection ---------------------------------------------------------------------------

    def _start_connect(self, order: Successor, now: float) -> None:
        self._deadline = now + HANDSHAKE_TIMEOUT_S
        try:
            connection = self._network.connect(order.host, order.port, self.source, self)
        except OSError as error:
            return self.end_connection(error)
        self.connection, self._connecting = connection, True

    def _send_hello(self, connection: Link) -> None:
        assert self._order is not None
        self._hello = send_hello(connection, self._identity, self._order.chain, self._nonce())
        self._connecting, self._incarnation = False, 0
        connection.message_bytes_max = wire.MESSAGE_BYTES_MAX

    def handle_message(self, message: FromSuccessor) -> None:
        """Handle a message of the successor."""
        if self.welcomed:
            self._note_progress(message)
            return self._sender.handle_message(message)
        if isinstance(message, PeerRefused):
            raise BadBytes("refused", message.reason)
        if isinstance(message, Challenge) and not self._incarnation:
            self._answer_challenge(message)
        elif isinstance(message, ChainWelcome) and self._incarnation:
            self._accept_welcome(message)
        else:
            raise BadBytes("no-welcome", type(message).__name__)

    def _note_progress(self, message: FromSuccessor) -> None:
        """Forget the stalls of a successor that has more than before them."""
        if isinstance(message, Want):
            before, self._chunks_there = self._chunks_there, sum(map(int.bit_count, message.have))
            if self._chunks_there <= before:
                return
        elif not isinstance(message, VersionDone):
            return
        self._stalls = 0

    def _answer_challenge(self, challenge: Challenge) -> None:
        """Verify that the successor is the ordered one and of this run, then send our proof."""
        assert self._order is not None and self.connection is not None and self._hello is not None
        me, name = self._identity, self._order.name
        self.connection.send(answer_challenge(me, self._hello, name, challenge))
        self._incarnation = challenge.incarnation

    def _accept_welcome(self, welcome: ChainWelcome) -> None:
        assert self._order is not None and self.connection is not None
        self.welcomed, self._complained, self._pause = True, False, RETRY_S_MIN
        self._emit(NeighbourUp(Side.SUCCESSOR, self._order.name, self._incarnation))
        self._sender.attach_link(
            self.connection,
            self._order.name,
            welcome,
            lambda reason: self.end_connection(ConnectionAbortedError(reason)),
        )

    def get_buffer(self, header: FrameHeader) -> memoryview:
        raise BadBytes("unasked-chunk", f"{header}")

    def handle_body(self, header: FrameHeader) -> None:
        raise AssertionError(header)

    def end_connection(self, error: BadBytes | OSError) -> None:
        """Close a connection that failed or ended, and retry after a pause."""
        stalled = isinstance(error, TimeoutError) and not self._connecting
        welcomed, self.welcomed, self._connecting = self.welcomed, False, False
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._order is None:
            return
        name = self._order.name
        self._deadline = self._clock() + self._pause
        self._pause = min(2 * self._pause, RETRY_S_MAX)
        if isinstance(error, BadBytes):
            self._report_once(error.reason, name, error)
        elif stalled:
            self._stalls += 1
            self._emit(Trouble("stalled", -1, name, str(error), stalls=self._stalls))
        elif not welcomed and not isinstance(error, ConnectionAbortedError):
            self._report_once("unreachable", name, error)
        if welcomed:
            self._sender.detach_link()
            self._emit(NeighbourDown(Side.SUCCESSOR, name, str(error)))

    def _report_once(self, kind: str, name: str, error: Exception) -> None:
        """Report a problem, once until it works again."""
        if not self._complained:
            self._complained = True
            self._emit(Trouble(kind, -1, name, str(error)))
