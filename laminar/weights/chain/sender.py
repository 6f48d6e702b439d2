"""Sending to the successor: which version, as chunks or as a delta, and in which order.

Reads   the table, frames of the successor, chunks that this relay's receiver has verified
Emits   frames to the successor; Trouble

A chunk that the successor lacks is sent as soon as it is verified here, even while the rest is
still in transfer to this relay. A version is finished before another one is offered, unless its
rest is not sent to this relay any more. The version stays pinned from the first byte until the
successor holds it, because the successor may request any chunk again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from laminar.weights.arena.region import Region
from laminar.weights.chain import wire
from laminar.weights.chain.reports import Report, Trouble
from laminar.weights.chain.transport import Transport
from laminar.weights.delta.cache import Delta, DeltaCache, encode_delta
from laminar.weights.delta.codec import Block
from laminar.weights.version.copy import VersionCopy, unpack_have
from laminar.weights.version.table import VersionTable


@dataclass(slots=True)
class Sending:
    """The version that is being sent to the successor."""

    copy: VersionCopy
    delta: Delta | None  #: delta to offer with the version
    offer: int = 0  #: number of the offer; 0: the first block of its delta is not encoded yet
    wanted: bool = False  #: the successor wants the version, and it is pinned
    by_block: bool = False
    todo: deque[int] = field(default_factory=deque)  #: chunks or blocks that can be sent now
    awaited: set[int] = field(default_factory=set)  #: chunks that are missing here, too

    @property
    def version(self) -> int:
        return self.copy.version

    @property
    def ready(self) -> bool:
        """Whether there is something to send now."""
        return bool(self.todo)

    @property
    def dry(self) -> bool:
        """Whether a wanted version has nothing to send until more arrives here."""
        return self.wanted and not self.todo and not self.copy.complete


class Sender:
    """The predecessor's side of a hop."""

    def __init__(
        self,
        table: VersionTable,
        cache: DeltaCache,
        arriving: Callable[[int], bool],
        beside: Callable[[Callable[[], None]], None],
        post: Callable[[Callable[[], None]], None],
        emit: Callable[[Report], object],
    ) -> None:
        """Begin without a successor.

        `arriving` returns whether a version is being sent to this relay. Long work runs in a
        thread, which calls back into the plane through `post`.
        """
        self.current: Sending | None = None
        self._table, self._cache = table, cache
        self._arriving, self._emit = arriving, emit
        self._beside, self._post = beside, post
        self._link: Transport | None = None
        self._fail: Callable[[str], None] = lambda reason: None
        self._peer = ""
        self._held: dict[int, str] = {}
        self._partial: set[int] = set()
        self._declined: set[int] = set()
        self._num_offers = 0

    # --- connection ---------------------------------------------------------------------------

    def attach_link(
        self, link: Transport, peer: str, welcome: wire.ChainWelcome, fail: Callable[[str], None]
    ) -> None:
        """Take the link of a successor that sent Welcome; `fail` ends this connection."""
        self._link, self._peer, self._fail = link, peer, fail
        self._held, self._partial = dict(welcome.held), set(welcome.partial)
        self._declined = set()
        self.refresh_offer()

    def detach_link(self) -> None:
        self._link = None
        self._release()

    def handle_message(self, message: wire.FromSuccessor) -> None:
        if isinstance(message, wire.Want):
            self._on_want(message)
        elif isinstance(message, wire.Resend):
            self._on_again(message)
        elif isinstance(message, wire.VersionDone):
            self._on_done(message)
        elif isinstance(message, wire.Decline):
            self._on_decline(message)
        else:
            assert isinstance(message, wire.ChainWelcome | wire.PeerRefused)
            raise wire.BadBytes("second-welcome", self._peer)

    # --- which version ------------------------------------------------------------------------

    def refresh_offer(self) -> None:
        """Offer the version that is best now."""
        if self._link is None:
            return
        version = self._choose_next()
        if version is None or (self.current is not None and version == self.current.version):
            return
        self._release()
        copy = self._table.get(version)
        if copy is not None:
            self.current = Sending(copy, self._find_delta(copy))
            self._send_offer()

    def _choose_next(self) -> int | None:
        """Return the version to offer in place of the current one; None: no change."""
        current, table = self.current, self._table
        if current is None or not current.wanted:
            return next_version(table.get_copies(), self._held, self._partial, self._declined)
        if not self._is_stuck():
            return None
        return next_version(table.get_complete_digests(), self._held, (), self._declined)

    def _is_stuck(self) -> bool:
        assert self.current is not None
        return self.current.dry and not self._arriving(self.current.version)

    def _send_offer(self) -> None:
        """Offer the current version; if it has a delta, wait for its first block."""
        current = self.current
        assert current is not None and self._link is not None
        copy, delta = current.copy, current.delta
        if delta is not None and not delta.num_here:
            return
        base = None if delta is None else wire.Base(version=delta.base, digest=delta.base_digest)
        self._num_offers += 1
        current.offer = self._num_offers
        offer = wire.Offer(number=current.offer, manifest=copy.get_manifest(), base=base)
        self._link.send(offer)

    def _release(self) -> None:
        if self.current is not None and self.current.wanted:
            self._table.unpin(self.current.version)
        self.current = None

    # --- answers of the successor ---------------------------------------------------------------

    def _on_want(self, want: wire.Want) -> None:
        current = self.current
        if current is None or not current.offer or current.offer != want.offer:
            return  # the message crossed with a newer offer
        have = unpack_have(want.have, current.copy.num_chunks)
        if have is None:
            raise wire.BadBytes("bad-have", f"{len(want.have)} bytes for {current.copy.num_chunks}")
        if not current.wanted and self._table.pin(current.version) is None:
            self.current = None  # evicted since it was offered
            return self.refresh_offer()
        current.wanted = True
        if want.from_block is None:
            self._queue_chunks(current, have)
        elif current.delta is not None:
            self._queue_blocks(current, current.delta, want.from_block)

    def _queue_chunks(self, current: Sending, have: bytearray) -> None:
        lacking = [index for index, there in enumerate(have) if not there]
        current.by_block = False
        current.todo = deque(index for index in lacking if current.copy.have[index])
        current.awaited = set(lacking).difference(current.todo)

    def _queue_blocks(self, current: Sending, delta: Delta, from_block: int) -> None:
        if from_block > delta.num_blocks:
            raise wire.BadBytes("bad-block", f"{from_block} of {delta.num_blocks}")
        current.by_block = True
        current.todo = deque(range(from_block, delta.num_here))
        current.awaited = set()

    def _on_again(self, again: wire.Resend) -> None:
        current, index = self.current, again.position
        if current is None or current.version != again.version or not current.wanted:
            return
        if index >= current.copy.num_chunks or not current.copy.have[index]:
            raise wire.BadBytes("bad-again", f"chunk {index} of version {again.version}")
        if not current.by_block:
            current.todo.appendleft(index)

    def _on_done(self, done: wire.VersionDone) -> None:
        self._held[done.version] = done.digest
        if self.current is not None and self.current.version == done.version:
            if done.digest != self.current.copy.digest:
                self._report_trouble(
                    "wrong-digest", done.version, f"the successor holds {done.digest}"
                )
            self._release()
        self.refresh_offer()

    def _on_decline(self, decline: wire.Decline) -> None:
        self._declined.add(decline.version)
        self._report_trouble("declined", decline.version, decline.reason)
        if self.current is not None and self.current.version == decline.version:
            self._release()
        self.refresh_offer()

    # --- news from this relay -----------------------------------------------------------------

    def add_chunk(self, version: int, index: int) -> None:
        current = self.current
        if current is not None and current.version == version and index in current.awaited:
            current.awaited.discard(index)
            current.todo.append(index)

    def add_block(self, delta: Delta) -> None:
        current = self.current
        if current is None or current.delta is not delta:
            return
        if not current.offer:
            self._send_offer()
        elif current.by_block:
            current.todo.append(delta.num_here - 1)

    def drop_delta(self, delta: Delta) -> None:
        """Stop using a delta that was given up; offer its version again without it."""
        current = self.current
        if current is not None and current.delta is delta:
            current.delta = None
            current.todo.clear()
            self._send_offer()

    def drop_version(self, version: int) -> None:
        """Stop sending a version whose slot is about to be reused."""
        current = self.current
        if current is None or current.version != version:
            return
        if self._link is not None and current.wanted:  # the kernel may still read the slot
            self._fail(f"version {version} was evicted while it was being sent")
        self._release()

    # --- bytes --------------------------------------------------------------------------------

    def push_next(self) -> None:
        """Push the next chunk or block to the link, if it is idle and there is one."""
        if self.current is not None and self._is_stuck():
            self.refresh_offer()
        current, link = self.current, self._link
        if current is None or link is None or not link.idle or not current.todo:
            return
        position = current.todo.popleft()
        if current.by_block:
            assert current.delta is not None
            checksum = current.delta.checksums[position]
            body = Region(memoryview(current.delta.payloads[position]))
            kind = wire.FrameKind.BLOCK
        else:
            checksum = current.copy.get_checksum(position)
            body = current.copy.get_chunk(position)
            kind = wire.FrameKind.CHUNK
        link.push(wire.FrameHeader(kind, body.nbytes, position, current.version, checksum), body)

    # --- deltas -------------------------------------------------------------------------------

    def _find_delta(self, copy: VersionCopy) -> Delta | None:
        """Return a delta from a version that the successor holds: received, or encoded here."""
        found = self._cache.find_delta(copy.version, self._held)
        if found is not None or not copy.complete or copy.version in self._partial:
            return found
        mine = self._table.get_complete_digests()
        common = [v for v in mine if v < copy.version and self._held.get(v) == mine[v]]
        return self._start_encoding(max(common), copy) if common else None

    def _start_encoding(self, base_version: int, copy: VersionCopy) -> Delta | None:
        base = self._table.pin(base_version)
        if base is None:
            return None
        delta = None
        if base.has_same_size(copy):
            delta = self._cache.open(copy.get_manifest(), base_version, base.digest)
        if delta is None:
            self._table.unpin(base_version)
            return None
        if self._table.pin(copy.version) is None:
            self._table.unpin(base_version)
            self._cache.give_up(delta)
            return None
        on_block, on_end = self._make_block_callback(delta), self._make_end_callback(delta)
        self._beside(lambda: encode_delta(base, copy, delta, on_block, on_end))
        return delta

    def _make_block_callback(self, delta: Delta) -> Callable[[Block], None]:
        """Return the encoding thread's callback for each block."""

        def arrived(block: Block) -> None:
            self._cache.add(delta, block.checksum, bytes(block.payload))
            if delta.given_up:
                self.drop_delta(delta)
            else:
                self.add_block(delta)

        return lambda block: self._post(lambda: arrived(block))

    def _make_end_callback(self, delta: Delta) -> Callable[[bool], None]:
        """Return the encoding thread's callback for the end of the delta."""

        def ended(complete: bool) -> None:
            self._table.unpin(delta.base)
            self._table.unpin(delta.version)
            if not complete:
                self._cache.give_up(delta)
                self.drop_delta(delta)

        return lambda complete: self._post(lambda: ended(complete))

    def _report_trouble(self, kind: str, version: int, detail: str) -> None:
        self._emit(Trouble(kind, version, self._peer, detail))


def next_version(
    mine: Collection[int],
    held: Collection[int],
    partial: Collection[int],
    declined: Collection[int],
) -> int | None:
    """Return the version to send to a successor that holds `held` and has begun `partial`.

    Prefers a version that the successor has begun, if it is among `mine` (complete or in transfer),
    so that its bytes are not wasted; else the newest. None: the successor needs nothing.
    """
    newest_held = max(held, default=-1)
    wanted = [version for version in mine if version > newest_held and version not in declined]
    begun = [version for version in wanted if version in partial]
    return max(begun or wanted, default=None)
