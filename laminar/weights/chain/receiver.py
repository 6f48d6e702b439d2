"""Reception of versions from the predecessor: which version, into which slot, which chunks.

Reads   frames of the predecessor; slots granted by the relay
Writes  the slot of the version that is being received
Emits   frames to the predecessor; SlotWanted, SlotReturned, Received, Trouble

A single version is received at a time. Its chunks survive a change of predecessor: the next one
learns which chunks are missing and sends those. A version that is not offered any more gives its
slot to the next offered one. A delta is another way to fill the chunks, and chunks that it leaves
wrong are requested in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from laminar.weights.arena.region import Region
from laminar.weights.chain.reports import (
    Received,
    Report,
    SlotReturned,
    SlotWanted,
    TransferPace,
    Trouble,
)
from laminar.weights.chain.sender import Sender
from laminar.weights.chain.transport import Transport
from laminar.weights.chain.wire import (
    BadBytes,
    ChainHello,
    Decline,
    FrameHeader,
    FrameKind,
    FromPredecessor,
    Offer,
    Resend,
    VersionDone,
    Want,
)
from laminar.weights.delta.cache import Delta, DeltaCache
from laminar.weights.delta.codec import DeltaError
from laminar.weights.delta.rebuild import Rebuild, begin_rebuild
from laminar.weights.version.copy import VersionCopy, pack_have
from laminar.weights.version.manifest import have_same_bytes
from laminar.weights.version.table import VersionTable

SLOW_S = 60.0  #: interval of pace reports of a version; most transfers end before the first
REFUSALS_MAX = 3  #: number of damaged arrivals of the same chunk or block that ends a connection


@dataclass(slots=True)
class ReceiveProgress:
    """The progress of receiving a version, for reports of its pace."""

    begun: float = 0.0
    num_bytes: int = 0
    by_delta: bool = False
    told: float = 0.0  #: time of the last pace report, or of the first byte
    told_bytes: int = 0  #: value of `num_bytes` at that time

    def report_pace(
        self, now: float, copy: VersionCopy, peer: str, emit: Callable[[Report], object]
    ) -> float | None:
        """Report the pace if it is due and bytes came; return when the next report is due."""
        if not self.num_bytes or self.by_delta:
            return None
        seconds, came = now - self.told, self.num_bytes - self.told_bytes
        if seconds >= SLOW_S:
            self.told, self.told_bytes = now, self.num_bytes
            left = copy.bounds[-1] * (copy.num_chunks - copy.num_have) // copy.num_chunks
            if came and left:
                detail = f"{copy.num_have} of {copy.num_chunks} chunks received"
                emit(Trouble("slow", copy.version, peer, detail, TransferPace(came, seconds, left)))
        return self.told + SLOW_S


class Receiver:
    """The successor's side of a hop."""

    def __init__(
        self,
        table: VersionTable,
        cache: DeltaCache,
        sender: Sender,
        region: Callable[[int], Region],
        clock: Callable[[], float],
        emit: Callable[[Report], object],
    ) -> None:
        """Begin without a predecessor; `region` maps a granted slot to its bytes."""
        self.incoming: VersionCopy | None = None
        self._table, self._cache, self._sender = table, cache, sender
        self._region, self._clock, self._emit = region, clock, emit
        self._link: Transport | None = None
        self._fail: Callable[[str], None] = lambda reason: None
        self._peer = ""
        self._offer: Offer | None = None  #: offer that waits for a slot
        self._taken = 0  #: number of the offer of `incoming`
        self._slot_wanted = False
        self._arrival = ReceiveProgress()
        self._refusals: Counter[tuple[FrameKind, int]] = Counter()
        self._rebuild: Rebuild | None = None  #: delta rebuild of `incoming`
        self._block = bytearray()  #: body of the block that is arriving

    # --- connection ---------------------------------------------------------------------------

    @property
    def linked(self) -> bool:
        return self._link is not None

    def attach_link(self, link: Transport, peer: str, fail: Callable[[str], None]) -> None:
        """Take the link of a welcomed predecessor; `fail` ends this connection."""
        self._link, self._peer, self._fail = link, peer, fail
        self._refusals.clear()

    def detach_link(self) -> None:
        """Forget the link of a lost predecessor; chunks of an incomplete version stay."""
        self._link = self._offer = None
        self._end_rebuild()

    def handle_message(self, message: FromPredecessor) -> None:
        if isinstance(message, Offer):
            self._on_offer(message)
        else:
            assert isinstance(message, ChainHello)
            raise BadBytes("second-hello", message.name)

    def report_pace(self, now: float) -> float | None:
        """Report the pace of a slow transfer; return when to check again."""
        copy, report = self.incoming, self._emit
        return (
            self._arrival.report_pace(now, copy, self._peer, report) if copy is not None else None
        )

    # --- which version, into which slot ---------------------------------------------------------

    def _on_offer(self, offer: Offer) -> None:
        version = offer.manifest.version
        self._offer = None
        held = self._table.get(version)
        latest = self._table.get_latest()
        if held is not None and held.complete:
            return self._confirm_held(held, offer)
        if version <= latest:
            return self._send_decline(version, f"version {latest} is held")
        if held is not None and not have_same_bytes(held.get_manifest(), offer.manifest):
            self._report_trouble("wrong-layout", version, "two publishers describe it differently")
            held = None
        self._offer = offer
        if held is not None:
            self._accept_offer(held)
        elif self.incoming is not None:
            self._receive_into(self._let_go())
        elif not self._slot_wanted:
            self._slot_wanted = True
            self._emit(SlotWanted(version, offer.manifest.total_bytes))

    def _confirm_held(self, held: VersionCopy, offer: Offer) -> None:
        version, offered = held.version, offer.manifest.digest
        if offered != held.digest:
            detail = f"{held.digest} is held, {offered} was offered"
            self._report_trouble("wrong-digest", version, detail)
            return self._send_decline(version, detail)
        self._send(VersionDone(version=version, digest=held.digest))

    def take_slot(self, slot: int) -> None:
        """Take a granted slot for the version that is on offer now."""
        self._slot_wanted = False
        if self._offer is None:
            self._emit(SlotReturned(slot))
        else:
            self._receive_into(slot)

    def decline_offer(self, reason: str) -> None:
        """Decline the offered version, for which there will be no slot."""
        self._slot_wanted = False
        if self._offer is not None:
            version, self._offer = self._offer.manifest.version, None
            self._report_trouble("denied", version, reason)
            self._send_decline(version, reason)

    def handle_publish(self, copy: VersionCopy) -> None:
        """Handle a version that was written here and put into the table.

        A relay where whole versions are published is the head of its chain. A predecessor that is
        still sending an older version belongs to a chain that is over, or is dead.
        """
        incoming = self.incoming
        older = incoming is not None and incoming.version < copy.version
        if older and self._link is not None:
            self._fail(f"version {copy.version} was published here")
        self._drop_older()
        if self._offer is not None and self._offer.manifest.version == copy.version:
            self._on_offer(self._offer)

    def _receive_into(self, slot: int) -> None:
        """Receive the offered version into this slot."""
        assert self._offer is not None
        manifest, region = self._offer.manifest, self._region(slot)
        if region.nbytes < manifest.total_bytes:
            detail = f"{manifest.total_bytes} bytes do not fit into a slot of {region.nbytes}"
            self._emit(SlotReturned(slot))
            return self.decline_offer(detail)
        copy = VersionCopy(manifest, slot, region)
        self._table.put(copy)
        self._accept_offer(copy)

    def _accept_offer(self, copy: VersionCopy) -> None:
        """Request the missing chunks of the offered copy."""
        assert self._offer is not None
        offer, self._offer = self._offer, None
        self._taken = offer.number
        if self.incoming is not copy:
            self._arrival = ReceiveProgress()
        self.incoming = copy
        self._end_rebuild()
        if offer.base is not None:
            base = offer.base
            self._rebuild = begin_rebuild(self._table, self._cache, copy, base.version, base.digest)
        self._send_want()
        self._sender.refresh_offer()

    def _send_want(self) -> None:
        assert self.incoming is not None
        from_block = self._rebuild.next_block if self._rebuild is not None else None
        have = pack_have(self.incoming.have)
        self._send(Want(offer=self._taken, have=have, from_block=from_block))

    def _let_go(self) -> int:
        """Drop the version that is being received and return its slot, which is free now."""
        assert self.incoming is not None
        copy, self.incoming = self.incoming, None
        self._end_rebuild()
        self._table.remove(copy.version)
        self._sender.drop_version(copy.version)
        return copy.slot

    # --- bytes --------------------------------------------------------------------------------

    def get_buffer(self, header: FrameHeader) -> memoryview:
        """Return the buffer for a chunk or block.

        A chunk that was not requested is refused, as it would overwrite verified bytes.
        """
        if not self._arrival.num_bytes:
            self._arrival.begun = self._arrival.told = self._clock()
        self._arrival.num_bytes += header.length
        if header.kind == FrameKind.BLOCK:
            self._arrival.by_delta = True
            self._block = bytearray(header.length)
            return memoryview(self._block)
        copy, index = self.incoming, header.position
        if copy is None or copy.version != header.version or index >= copy.num_chunks:
            raise BadBytes("unasked-chunk", f"{header}")
        target = copy.get_chunk(index)
        if copy.have[index] or target.nbytes != header.length:
            raise BadBytes("unasked-chunk", f"{header}")
        target.populate_pages()
        return target.view

    def handle_body(self, header: FrameHeader) -> None:
        if header.kind == FrameKind.BLOCK:
            return self._handle_block(header)
        copy = self.incoming
        assert copy is not None
        if copy.accept_chunk(header.position, header.checksum):
            self._sender.add_chunk(copy.version, header.position)
        else:
            self._count_damage(header)
            self._send(Resend(version=copy.version, position=header.position))

    def _count_damage(self, header: FrameHeader) -> None:
        """Count a damaged chunk or block; the third time raises BadBytes, ending the connection."""
        name = header.kind.name.lower()
        where = f"{name} {header.position}"
        self._report_trouble(
            f"damaged-{name}", header.version, f"{where} does not match its checksum"
        )
        self._refusals[header.kind, header.position] += 1
        if self._refusals[header.kind, header.position] >= REFUSALS_MAX:
            raise BadBytes(f"damaged-{name}", f"{where} of version {header.version}, repeatedly")

    # --- deltas -------------------------------------------------------------------------------

    def _handle_block(self, header: FrameHeader) -> None:
        rebuild, copy = self._rebuild, self.incoming
        if rebuild is None or copy is None or copy.version != header.version:
            return  # belongs to a delta that was given up here
        if header.position != rebuild.next_block or rebuild.over:
            return  # sent before the sender knew that an earlier block was damaged
        if xxhash.xxh3_64_intdigest(self._block) != header.checksum:
            self._count_damage(header)
            return self._send_want()
        try:
            proved = rebuild.apply_next(header.checksum, self._block)
        except DeltaError as error:
            return self._in_full(str(error))
        self._forward_block(rebuild.delta, header.checksum)
        for index in proved:
            self._sender.add_chunk(copy.version, index)
        if rebuild.over:
            wrong = copy.num_chunks - copy.num_have
            if wrong:
                self._in_full(f"{wrong} of {copy.num_chunks} chunks differ from those published")
            else:
                self._end_rebuild()

    def _forward_block(self, delta: Delta, checksum: int) -> None:
        """Cache the block for the successor."""
        self._cache.add(delta, checksum, self._block)
        if delta.given_up:
            self._sender.drop_delta(delta)
        else:
            self._sender.add_block(delta)

    def _end_rebuild(self) -> None:
        if self._rebuild is None:
            return
        rebuild, self._rebuild = self._rebuild, None
        rebuild.release_base()
        if not rebuild.over:
            self._cache.give_up(rebuild.delta)
            self._sender.drop_delta(rebuild.delta)

    def _in_full(self, detail: str) -> None:
        """Give the delta up and request the missing chunks in full."""
        assert self.incoming is not None
        self._report_trouble("wrong-delta", self.incoming.version, detail)
        self._end_rebuild()
        self._send_want()

    # --- the end ------------------------------------------------------------------------------

    def advance_digest(self) -> bool:
        """Continue the digest and finish a complete version; return whether there is more to do."""
        copy = self.incoming
        if copy is None:
            return False
        if copy.digest_step():
            return True
        digest = copy.get_computed_digest()
        if digest is not None:
            self._finish(copy, digest)
        return False

    def _finish(self, copy: VersionCopy, digest: str) -> None:
        version = copy.version
        if copy.digest != digest:
            detail = f"all chunks match, but the digest is {digest}, not {copy.digest}"
            self._report_trouble("wrong-digest", version, detail)
            self._emit(SlotReturned(self._let_go()))
            return self._send_decline(version, detail)
        if version < self._table.get_latest():
            self._emit(SlotReturned(self._let_go()))
            return self._send(VersionDone(version=version, digest=digest))
        self._end_rebuild()
        self.incoming = None
        copy.complete = True
        arrival = self._arrival
        seconds = self._clock() - arrival.begun if arrival.num_bytes else 0.0
        self._emit(
            Received(copy.get_manifest(), copy.slot, arrival.by_delta, arrival.num_bytes, seconds)
        )
        self._send(VersionDone(version=version, digest=digest))
        self._drop_older()
        self._sender.refresh_offer()

    def _drop_older(self) -> None:
        """Drop the incoming version if it is older than the newest complete one."""
        copy = self.incoming
        if copy is None or copy.version >= self._table.get_latest():
            return
        if self._table.get(copy.version) is copy:
            self._emit(SlotReturned(self._let_go()))

    # --- helpers ------------------------------------------------------------------------------

    def _send(self, message: Want | Resend | VersionDone | Decline) -> None:
        if self._link is not None:
            self._link.send(message)

    def _send_decline(self, version: int, reason: str) -> None:
        self._send(Decline(version=version, reason=reason))

    def _report_trouble(self, kind: str, version: int, detail: str) -> None:
        self._emit(Trouble(kind, version, self._peer, detail))
