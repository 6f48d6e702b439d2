"""Fetch of an exact version from any relay that holds it, outside the chain.

Reads   frames of the holder; a slot that the relay granted for the version
Writes  that slot
Emits   Hello, Proof, Want, Resend, VersionDone; SlotWanted, Received, SlotReturned, NotFetched

The chain brings the newest version only. If no machine with a free replica holds the version that
some work needs, copying that older version is worthwhile. Its bytes enter the version table only
when all are verified, so the chain neither offers them nor takes their slot. Any error ends the
fetch, and its requester decides what to do. While the chain receives a version, chunks are
requested only now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from laminar.weights.arena.region import Region
from laminar.weights.chain import wire
from laminar.weights.chain.downstream import answer_challenge, send_hello
from laminar.weights.chain.fetch_server import TRICKLE_S
from laminar.weights.chain.receiver import REFUSALS_MAX, ReceiveProgress
from laminar.weights.chain.reports import NotFetched, Received, Report, SlotReturned, SlotWanted
from laminar.weights.chain.transport import WRITABLE, Link, Network
from laminar.weights.chain.upstream import HANDSHAKE_TIMEOUT_S, PollEntry, RelayIdentity
from laminar.weights.chain.wire import (
    BadBytes,
    ChainHello,
    Challenge,
    Decline,
    FrameHeader,
    FrameKind,
    Offer,
    PeerRefused,
    Resend,
    VersionDone,
    Want,
)
from laminar.weights.version.copy import VersionCopy, pack_have
from laminar.weights.version.table import VersionTable

FETCH_TIMEOUT_S = 60.0
"""Timeout of a fetch; much longer than the pause between chunks while the chain is busy."""
WINDOW = 8
"""Maximum chunks requested and not yet received: the chain may need the line at any moment."""


class VersionHolder(NamedTuple):
    """A version and the relay that holds it."""

    version: int
    name: str
    host: str  #: numeric
    port: int


class Fetcher:
    """The queue of fetches; a single version is fetched at a time."""

    def __init__(
        self,
        identity: RelayIdentity,
        table: VersionTable,
        region: Callable[[int], Region],
        network: Network,
        clock: Callable[[], float],
        nonce: Callable[[], bytes],
        emit: Callable[[Report], object],
        receiving: Callable[[], bool],
    ) -> None:
        """Begin with an empty queue; `receiving` returns whether the chain receives a version."""
        self.source = "0.0.0.0"  #: this relay's address
        self._identity, self._table, self._region = identity, table, region
        self._network, self._clock, self._nonce, self._emit = network, clock, nonce, emit
        self._receiving = receiving
        self._waiting: deque[VersionHolder] = deque()
        self._from: VersionHolder | None = None
        self._connection: Link | None = None
        self._connecting = False
        self._hello: ChainHello | None = None
        self._offer: Offer | None = None
        self._copy: VersionCopy | None = None
        self._slot_wanted = False
        self._deadline = 0.0
        self._refusals = 0
        self._asked = 0  #: index before which all chunks were requested
        self._coming = 0  #: number of requested chunks that have not arrived
        self._asked_at = 0.0
        self._arrival = ReceiveProgress()

    def fetch(self, holder: VersionHolder) -> None:
        """Queue the fetch of a version from its holder."""
        if holder != self._from and holder not in self._waiting:
            self._waiting.append(holder)
        self._start_next()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _start_next(self) -> None:
        """Connect to the next holder, unless a slot requested by the previous fetch is due."""
        if self._from is not None or self._slot_wanted or not self._waiting:
            return
        self._from = holder = self._waiting.popleft()
        self._deadline = self._clock() + HANDSHAKE_TIMEOUT_S
        self._refusals = 0
        try:
            self._connection = self._network.connect(holder.host, holder.port, self.source, self)
            self._connecting = True
        except OSError as error:
            self._fail_fetch(str(error))

    # --- one turn -----------------------------------------------------------------------------

    def iter_poll_entries(self) -> Iterator[PollEntry]:
        """Yield the connection to poll, with its interest and action."""
        connection = self._connection
        if connection is not None:
            interest = WRITABLE if self._connecting else connection.get_interest()
            yield connection, interest, lambda events: self._handle_events(connection, events)

    def check_timers(self, now: float) -> float | None:
        """Give up after a timeout; return when to check again."""
        if self._from is None or self._slot_wanted:
            return None
        if now >= self._deadline:
            self._fail_fetch("it sent nothing in time")
            return now
        copy = self._copy
        if copy is None:
            return self._deadline
        due = [self._deadline]
        if (
            told_again := self._arrival.report_pace(now, copy, self._from.name, self._emit)
        ) is not None:
            due.append(told_again)
        if not self._coming and self._asked < copy.num_chunks:
            due.append(self._asked_at + TRICKLE_S)
        return min(due)

    def flush(self) -> None:
        """Send what can be sent now."""
        if self._connection is None or self._connecting:
            return
        if self._copy is not None:
            self._request_chunks(self._copy, self._connection)
        self._run_guarded(self._connection.flush)

    def _request_chunks(self, copy: VersionCopy, connection: Link) -> None:
        """Request more chunks once half of the window has arrived."""
        if self._asked == copy.num_chunks or self._coming > WINDOW // 2:
            return
        count, now = WINDOW - self._coming, self._clock()
        if self._receiving():
            count = 1
            if self._coming or now < self._asked_at + TRICKLE_S:
                return
        assert self._offer is not None
        end = min(copy.num_chunks, self._asked + count)
        have = bytearray(b"\1" * copy.num_chunks)
        have[self._asked : end] = bytes(end - self._asked)
        self._coming += end - self._asked
        self._asked, self._asked_at = end, now
        connection.send(Want(offer=self._offer.number, have=pack_have(have), from_block=None))

    def advance_digest(self) -> bool:
        """Continue the digest; return whether there is more to do now."""
        copy = self._copy
        if copy is None or copy.digest_step():
            return copy is not None
        digest = copy.get_computed_digest()
        if digest is not None:
            self._finish(copy, digest)
        return False

    def _handle_events(self, connection: Link, events: int) -> None:
        if connection is not self._connection:
            return
        if self._connecting:
            self._run_guarded(lambda: self._send_hello(connection))
        elif events & ~WRITABLE:
            self._run_guarded(connection.read)

    def _run_guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (BadBytes, OSError) as error:
            self._fail_fetch(str(error))

    # --- messages of the holder -----------------------------------------------------------------

    def _send_hello(self, connection: Link) -> None:
        assert self._from is not None
        version = self._from.version
        self._hello = send_hello(connection, self._identity, 0, self._nonce(), version)
        self._connecting = False

    def handle_message(self, message: wire.FromSuccessor | wire.FromPredecessor) -> None:
        """Handle a message of the holder."""
        assert self._connection is not None and self._from is not None
        if isinstance(message, PeerRefused):
            raise BadBytes("refused", message.reason)
        if isinstance(message, Decline):
            raise BadBytes("declined", message.reason)
        if isinstance(message, Challenge) and self._hello is not None:
            proof = answer_challenge(self._identity, self._hello, self._from.name, message)
            self._connection.send(proof)
            self._hello = None
            self._connection.message_bytes_max = wire.MESSAGE_BYTES_MAX
            self._connection.decoder = wire.holder_decoder
        elif isinstance(message, Offer) and self._hello is None and self._offer is None:
            self._on_offer(self._from, message)
        else:
            raise BadBytes("no-offer", type(message).__name__)

    def _on_offer(self, holder: VersionHolder, offer: Offer) -> None:
        if offer.manifest.version != holder.version:
            raise BadBytes("other-version", f"version {offer.manifest.version}")
        self._offer, self._slot_wanted = offer, True
        self._emit(SlotWanted(holder.version, offer.manifest.total_bytes, fetched=True))

    def take_slot(self, slot: int) -> None:
        """Take the slot for the version; a negative slot means that there will be none."""
        self._slot_wanted = False
        offer, connection = self._offer, self._connection
        if offer is None or connection is None:  # the fetch has ended meanwhile
            if slot >= 0:
                self._emit(SlotReturned(slot, fetched=True))
            return self._start_next()
        if slot < 0:
            return self._fail_fetch("no slot is free for it here")
        region = self._region(slot)
        copy = VersionCopy(offer.manifest, slot, region)
        now = self._clock()
        self._copy, self._arrival = copy, ReceiveProgress(begun=now, told=now)
        self._deadline, self._asked_at = now + FETCH_TIMEOUT_S, now
        self._asked = self._coming = 0

    # --- bytes --------------------------------------------------------------------------------

    def get_buffer(self, header: FrameHeader) -> memoryview:
        """Return the buffer for a chunk, of exactly header.length bytes."""
        copy, index = self._copy, header.position
        asked = copy is not None and copy.version == header.version and index < copy.num_chunks
        if copy is None or not asked or header.kind != FrameKind.CHUNK or copy.have[index]:
            raise BadBytes("unasked-chunk", f"{header}")
        target = copy.get_chunk(index)
        if target.nbytes != header.length:
            raise BadBytes("unasked-chunk", f"{header}")
        target.populate_pages()
        return target.view

    def handle_body(self, header: FrameHeader) -> None:
        copy, connection = self._copy, self._connection
        assert copy is not None and connection is not None
        self._arrival.num_bytes += header.length
        self._deadline = self._clock() + FETCH_TIMEOUT_S
        if copy.accept_chunk(header.position, header.checksum):
            self._coming -= 1
            return
        self._refusals += 1
        if self._refusals >= REFUSALS_MAX:
            raise BadBytes("damaged-chunk", f"chunk {header.position}, repeatedly")
        connection.send(Resend(version=copy.version, position=header.position))

    # --- the end ------------------------------------------------------------------------------

    def _finish(self, copy: VersionCopy, digest: str) -> None:
        if digest != copy.digest:
            return self._fail_fetch(
                f"all chunks match, but the digest is {digest}, not {copy.digest}"
            )
        if self._table.get(copy.version) is not None:
            return self._fail_fetch("the chain delivers it")
        assert self._connection is not None
        self._copy = None
        copy.complete = True
        self._table.put(copy)
        seconds, came = self._clock() - self._arrival.begun, self._arrival.num_bytes
        self._emit(Received(copy.get_manifest(), copy.slot, False, came, seconds, fetched=True))
        self._connection.send(VersionDone(version=copy.version, digest=digest))
        self._run_guarded(self._connection.flush)
        self._end_fetch()

    def _fail_fetch(self, reason: str) -> None:
        """Report that the holder does not deliver the version, and end the fetch."""
        holder, copy = self._from, self._copy
        if copy is not None:
            self._copy = None
            self._emit(SlotReturned(copy.slot, fetched=True))
        if holder is not None:
            self._emit(NotFetched(holder.version, holder.name, reason))
        self._end_fetch()

    def _end_fetch(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._offer = self._hello = self._from = None
        self._connecting = False
        self._start_next()
