"""The predecessor side of a relay: it accepts its predecessor and relays that fetch versions.

Reads   connections; frames of unauthenticated peers and of the predecessor
Emits   Challenge, Welcome and PeerRefused; NeighbourUp, NeighbourDown, Trouble, PeerRejected

Any process that reaches the port can connect, so unauthenticated peers get little: few connections,
a short time, and two small messages, which name this run and prove membership (handshake.py). There
is a single predecessor. Orders of the coordinator are numbered, and the highest number wins: a
relay that was removed from the chain, and does not know it yet, cannot displace the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from laminar.net.rejected_peers import RejectedPeers
from laminar.weights.chain import wire
from laminar.weights.chain.fetch_server import FetchHandler
from laminar.weights.chain.handshake import PREDECESSOR, SUCCESSOR, compute_proof, verify_proof
from laminar.weights.chain.receiver import Receiver
from laminar.weights.chain.reports import (
    NeighbourDown,
    NeighbourUp,
    PeerRejected,
    Report,
    Side,
    Trouble,
)
from laminar.weights.chain.transport import READABLE, WRITABLE, Endpoint, Link, Listener, Network
from laminar.weights.chain.wire import (
    BadBytes,
    ChainHello,
    ChainWelcome,
    Challenge,
    FrameHeader,
    FromPredecessor,
    PeerRefused,
    Proof,
)
from laminar.weights.version.table import VersionTable

OLD_CHAIN = "old-chain"  #: reason for which a relay of this run is refused
PENDING_PEERS_MAX = 8
FETCHES_MAX = 8  #: maximum relays that fetch versions from this one at a time
HANDSHAKE_TIMEOUT_S = 5.0  #: timeout of connecting and the handshake, on both sides

PollEntry = tuple[Endpoint, int, Callable[[int], None]]
"""Endpoint to poll, events to poll for, and the action to call with the events that occurred."""


@dataclass(frozen=True, slots=True)
class RelayIdentity:
    """A relay's name, boot and run, and the key that proves membership of the run."""

    run: str  #: name of the run; relays of other runs are refused
    name: str
    incarnation: int
    key: bytes = field(repr=False)


class _PendingPeer:
    """The frame handler of a connection that has not proved membership of this run."""

    def __init__(
        self,
        greet: Callable[[ChainHello], Challenge],
        admit: Callable[[ChainHello, Challenge, bytes], None],
        until: float,
    ) -> None:
        self._greet, self._admit = greet, admit
        self._hello: ChainHello | None = None
        self._challenge: Challenge | None = None
        self.until = until

    def handle_message(self, message: FromPredecessor) -> None:
        if self._hello is None or self._challenge is None:
            if not isinstance(message, ChainHello):
                raise BadBytes("no-hello", type(message).__name__)
            self._hello, self._challenge = message, self._greet(message)
        elif isinstance(message, Proof):
            self._admit(self._hello, self._challenge, message.proof)
        else:
            raise BadBytes("no-proof", type(message).__name__)

    def get_buffer(self, header: FrameHeader) -> memoryview:
        raise BadBytes("no-hello", f"{header}")

    def handle_body(self, header: FrameHeader) -> None:
        raise AssertionError(header)


class Upstream:
    """The listener, its unauthenticated peers, fetching relays and the predecessor."""

    def __init__(
        self,
        identity: RelayIdentity,
        table: VersionTable,
        receiver: Receiver,
        sending: Callable[[], bool],
        clock: Callable[[], float],
        nonce: Callable[[], bytes],
        emit: Callable[[Report], object],
    ) -> None:
        """Begin without a listener; `sending` returns whether the successor is served."""
        self.predecessor: Link | None = None
        self.peer = ""
        self._chain = 0
        self._clock, self._nonce, self._sending = clock, nonce, sending
        self._identity, self._table, self._receiver, self._emit = identity, table, receiver, emit
        self._strangers: dict[Link, _PendingPeer] = {}
        self._fetching: dict[Link, FetchHandler] = {}
        self._listener: Listener | None = None

    def open(self, network: Network, host: str, port: int) -> tuple[str, int]:
        """Listen; return the address for predecessors. Raises OSError if it is not available."""
        self._listener = network.listen(host, port)
        host, port = self._listener.address
        self._told = RejectedPeers(f"{host}:{port}", lambda what: self._emit(PeerRejected(what)))
        return host, port

    def close(self) -> None:
        for connection in (*self._strangers, *self._fetching, self.predecessor):
            if connection is not None:
                connection.close()
        if self._listener is not None:
            self._listener.close()

    # --- one turn -----------------------------------------------------------------------------

    def iter_poll_entries(self) -> Iterator[PollEntry]:
        """Yield the endpoints to poll, with their interest and action."""
        if self._listener is not None:
            yield self._listener, READABLE, lambda events: self._accept_connection()
        for connection in self._list_connections():
            holding = self._fetching.get(connection)
            more = WRITABLE if holding is not None and holding.ready else 0
            yield connection, connection.get_interest() | more, self._make_event_handler(connection)

    def flush(self) -> None:
        if self.predecessor is not None and not self.predecessor.idle:
            self._handle_events(self.predecessor, 0)
        for connection, holding in list(self._fetching.items()):
            holding.push_next()
            if not connection.idle:
                self._handle_events(connection, 0)

    def check_timers(self, now: float) -> float | None:
        """Close peers whose handshake timed out; return when to be called next, or None."""
        late = [c for c, stranger in self._strangers.items() if now >= stranger.until]
        for connection in late:
            self._end_connection(connection, BadBytes("no-hello", "nothing in time"))
        due = [stranger.until for stranger in self._strangers.values()]
        due += [
            at for holding in self._fetching.values() if (at := holding.get_due_time()) is not None
        ]
        return min(due, default=None)

    def _list_connections(self) -> list[Link]:
        predecessor = [] if self.predecessor is None else [self.predecessor]
        return [*self._strangers, *predecessor, *self._fetching]

    def _make_event_handler(self, connection: Link) -> Callable[[int], None]:
        return lambda events: self._handle_events(connection, events)

    def _handle_events(self, connection: Link, events: int) -> None:
        known = connection is self.predecessor or connection in self._strangers
        if not known and connection not in self._fetching:
            return  # displaced earlier in this turn
        try:
            if events & ~WRITABLE:
                connection.read()
            connection.flush()
        except (BadBytes, OSError) as error:
            self._end_connection(connection, error)

    # --- connections --------------------------------------------------------------------------

    def _accept_connection(self) -> None:
        assert self._listener is not None
        stranger = _PendingPeer(
            lambda hello: self._send_challenge(connection, hello),
            lambda *shown: self._admit_peer(connection, *shown),
            self._clock() + HANDSHAKE_TIMEOUT_S,
        )
        accepted = self._listener.accept(stranger)
        if accepted is None:
            return
        connection = accepted
        if len(self._strangers) >= PENDING_PEERS_MAX:
            self._told.record_rejected(1, self._clock())
            return connection.close()
        self._strangers[connection] = stranger

    def _send_challenge(self, connection: Link, hello: ChainHello) -> Challenge:
        """Prove that this relay belongs to the run, and challenge the peer to do the same."""
        me = self._identity
        if hello.run != me.run:
            raise self._send_refusal(
                connection, "other-run", f"this relay does not belong to run {hello.run}"
            )
        nonce = self._nonce()
        bare = Challenge(name=me.name, incarnation=me.incarnation, nonce=nonce, proof=b"")
        challenge = replace(bare, proof=compute_proof(me.key, SUCCESSOR, hello, bare))
        connection.send(challenge)
        return challenge

    def _admit_peer(
        self, connection: Link, hello: ChainHello, challenge: Challenge, proof: bytes
    ) -> None:
        """Accept a peer as predecessor, or serve its fetch, if its proof and order are valid."""
        if not verify_proof(self._identity.key, PREDECESSOR, hello, challenge, proof):
            detail = f"{hello.name} does not have the secret of run {hello.run}"
            raise self._send_refusal(connection, "other-secret", detail)
        if hello.fetch is not None:
            return self._serve_fetch(connection, hello.fetch)
        if hello.chain < self._chain:
            detail = f"chain {hello.chain} has ended, the current one is {self._chain}"
            raise self._send_refusal(connection, OLD_CHAIN, detail)
        if self.predecessor is not None:
            self._end_connection(
                self.predecessor, ConnectionAbortedError(f"{hello.name} took its place")
            )
        del self._strangers[connection]
        self._chain, self.predecessor, self.peer = hello.chain, connection, hello.name
        connection.handler = self._receiver
        connection.message_bytes_max = wire.MESSAGE_BYTES_MAX
        connection.send(
            ChainWelcome(
                held=self._table.get_complete_digests(), partial=self._table.list_partial()
            )
        )
        self._receiver.attach_link(
            connection,
            hello.name,
            lambda reason: self._end_connection(connection, ConnectionAbortedError(reason)),
        )
        self._emit(NeighbourUp(Side.PREDECESSOR, hello.name, hello.incarnation))

    def _serve_fetch(self, connection: Link, version: int) -> None:
        """Let the other side fetch this version from here."""
        if len(self._fetching) >= FETCHES_MAX:
            detail = f"{FETCHES_MAX} relays already fetch versions from {self._identity.name}"
            raise self._send_refusal(connection, "too-many-fetches", detail)
        del self._strangers[connection]
        connection.message_bytes_max = wire.MESSAGE_BYTES_MAX
        connection.decoder = wire.successor_decoder
        holding = FetchHandler(self._table, connection, version, self._sending, self._clock)
        self._fetching[connection] = connection.handler = holding

    def _send_refusal(self, connection: Link, reason: str, detail: str) -> BadBytes:
        connection.send(PeerRefused(reason=detail))
        return BadBytes(reason, detail)

    def _end_connection(self, connection: Link, error: BadBytes | OSError) -> None:
        if isinstance(error, BadBytes):
            self._say_bye(connection)
        connection.close()
        holding = self._fetching.pop(connection, None)
        if holding is not None:
            return holding.end_fetch()
        if self._strangers.pop(connection, None) is not None:
            if isinstance(error, BadBytes) and error.reason != OLD_CHAIN:
                self._told.record_rejected(1, self._clock())
            return
        self.predecessor = None
        peer, self.peer = self.peer, ""
        self._receiver.detach_link()
        if isinstance(error, BadBytes):
            self._emit(Trouble(error.reason, -1, peer, str(error)))
        self._emit(NeighbourDown(Side.PREDECESSOR, peer, str(error)))

    def _say_bye(self, connection: Link) -> None:
        """Try to send the reason of a refusal."""
        try:
            connection.flush()
        except (BadBytes, OSError):
            pass
