"""What one relay's bulk plane decides, without the thread, the sockets and the clock it runs on.

Reads   slots of the relay, frames of its neighbours
Writes  slots that were granted, frames to its neighbours
Emits   reports (reports.py)
Gives   PlaneCore, PlaneOptions; PlaneError with one sentence for a user

Its owner takes turns: `turn`, then wait for what `readiness` names, at most for as long as
`turn` said, then act on what is ready, then carry out orders. transfer_thread.py does that with one
thread and poll(); the simulator does it in virtual time.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from laminar.weights.arena.region import Region
from laminar.weights.chain.downstream import Downstream, Successor
from laminar.weights.chain.fetch import Fetcher, VersionHolder
from laminar.weights.chain.receiver import Receiver
from laminar.weights.chain.reports import Report, Status, Trouble
from laminar.weights.chain.sender import Sender
from laminar.weights.chain.transport import Network
from laminar.weights.chain.upstream import PollEntry, RelayIdentity, Upstream
from laminar.weights.delta.cache import DeltaCache
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.manifest import Draft, Manifest
from laminar.weights.version.table import VersionTable

STALLED_S = 5.0
"""The time without a byte where bytes are due, after which that is reported."""


class PlaneError(RuntimeError):
    """The plane cannot do what was asked; one sentence with the thing, the value and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """What a user may choose."""

    delta_bytes_max: int = 0  #: of encoded deltas kept; 0: versions always go out whole
    send_rate: int = 0  #: bytes per second at most; 0: no limit
    congestion: str = ""  #: of TCP, by the kernel's name; empty: the machine's default


@dataclass(frozen=True, slots=True)
class PlaneRuntime:
    """What the core runs on."""

    network: Network
    clock: Callable[[], float]  #: seconds; only ever goes forward
    nonce: Callable[[], bytes]  #: NONCE_BYTES that were never used before
    post: Callable[[Callable[[], None]], None]  #: have an order carried out in its turn
    beside: Callable[[Callable[[], None]], None]  #: run what takes long


class PlaneCore:
    """Upstream, downstream and what is between them. Owned by the code that takes its turns;
    `publish`, `publish_share`, `order` and `status` may be called from elsewhere."""

    def __init__(
        self,
        identity: RelayIdentity,
        table: VersionTable,
        region: Callable[[int], Region],
        notify: Callable[[Report], object],
        options: PlaneOptions,
        world: PlaneRuntime,
    ) -> None:
        """`region`: all bytes of a slot. `notify`: takes a report and returns at once."""
        self._table, self._region, self._notify, self._world = table, region, notify, world
        cache = DeltaCache(options.delta_bytes_max)
        self._sender = Sender(table, cache, self._is_arriving, world.beside, world.post, notify)
        self._receiver = Receiver(table, cache, self._sender, region, world.clock, notify)
        self._upstream = Upstream(
            identity, table, self._receiver, self._is_sending, world.clock, world.nonce, notify
        )
        self._fetcher = Fetcher(
            identity,
            table,
            region,
            world.network,
            world.clock,
            world.nonce,
            notify,
            self._is_receiving,
        )
        self._downstream = Downstream(
            identity, self._sender, world.network, world.clock, world.nonce, notify
        )
        self._stalls: set[str] = set()

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen on a numeric address; the address for the predecessor's order.

        PlaneError if the address cannot be had.
        """
        try:
            ipaddress.ip_address(host)
            address = self._upstream.open(self._world.network, host, port)
        except (ValueError, OSError) as error:
            raise PlaneError(
                f"the relay cannot listen for weights on {host}:{port} ({error}); "
                "give it a numeric address of this machine and a free port"
            ) from None
        self._downstream.source = self._fetcher.source = host
        return address

    def close(self) -> None:
        self._upstream.close()
        self._downstream.close()
        self._fetcher.close()

    # --- orders: carried out in its next turn ---------------------------------------------------

    def set_successor(self, chain: int, successor: tuple[str, str, int] | None) -> None:
        """Feed relay (name, numeric host, port), or none.

        `chain` is the number of this order; a successor refuses a lower one than it has seen.
        """
        order = None if successor is None else Successor(*successor, chain)
        if order is not None:
            ipaddress.ip_address(order.host)
        self._world.post(lambda: self._downstream.set_successor(order))

    def publish_version(self, manifest: Manifest, slot: int) -> None:
        """A whole version was written here; its slot stays as it is until `forget` allows."""
        self._add_copy(VersionCopy.from_manifest(manifest, slot, self._region(slot)))

    def publish_share(self, draft: Draft, slot: int, checksums: Mapping[int, int]) -> None:
        """Some chunks of a version were written here: their checksums, by index.

        Received follows when the rest has come from the predecessor, or SlotReturned when a newer
        version was complete before that.
        """
        self._add_copy(VersionCopy.from_share(draft, slot, self._region(slot), checksums))

    def grant_slot(self, slot: int) -> None:
        """The answer to SlotWanted; the slot is the plane's until Received or SlotReturned."""
        self._world.post(lambda: self._receiver.take_slot(slot))

    def deny_slot(self, reason: str) -> None:
        """The other answer: there will never be a slot for it."""
        self._world.post(lambda: self._receiver.decline_offer(reason))

    def fetch(self, version: int, holder: tuple[str, str, int]) -> None:
        """Take this version from relay (name, numeric host, port), beside the chain: SlotWanted,
        and Received or NotFetched, follow."""
        order = VersionHolder(version, *holder)
        ipaddress.ip_address(order.host)
        self._world.post(lambda: self._fetcher.fetch(order))

    def fetch_into(self, slot: int) -> None:
        """The answer to SlotWanted of a fetch; below 0: there will be no slot."""
        self._world.post(lambda: self._fetcher.take_slot(slot))

    def _add_copy(self, copy: VersionCopy) -> None:
        # In the table before this returns, so that `forget` knows it from now on.
        self._table.put(copy)
        self._world.post(lambda: self._announce_copy(copy))

    def _announce_copy(self, copy: VersionCopy) -> None:
        self._receiver.handle_publish(copy)
        self._sender.refresh_offer()

    # --- turns --------------------------------------------------------------------------------

    def run_turn(self) -> float | None:
        """Digest and send; seconds after which the next turn is due, None: when something comes."""
        more = self._receiver.advance_digest() | self._fetcher.advance_digest()
        self._downstream.flush()
        self._upstream.flush()
        self._fetcher.flush()
        now = self._world.clock()
        due = (
            self._downstream.check_timers(now),
            self._upstream.check_timers(now),
            self._receiver.report_pace(now),
            self._fetcher.check_timers(now),
            self._report_stalls(now),
        )
        if more:
            return 0.0
        until = min((at for at in due if at is not None), default=None)
        return None if until is None else max(0.0, until - now)

    def iter_poll_entries(self) -> Iterator[PollEntry]:
        """What to wait for, and what to do then."""
        yield from self._upstream.iter_poll_entries()
        yield from self._downstream.iter_poll_entries()
        yield from self._fetcher.iter_poll_entries()

    def get_status(self) -> Status:
        """What is going on now."""
        incoming, current = self._receiver.incoming, self._sender.current
        received, sent = self._count_bytes()
        return Status(
            held=tuple(sorted(self._table.get_complete_digests())),
            receiving=-1 if incoming is None else incoming.version,
            chunks_here=0 if incoming is None else incoming.num_have,
            chunks_total=0 if incoming is None else incoming.num_chunks,
            sending=-1 if current is None else current.version,
            predecessor=self._upstream.peer,
            successor=self._downstream.peer,
            bytes_received=received,
            bytes_sent=sent,
            refused=dict(self._upstream.refused + self._downstream.refused),
            damaged=self._receiver.damaged,
        )

    def _count_bytes(self) -> tuple[int, int]:
        """Bytes received from predecessors and sent to successors, since the start."""
        ends = (self._upstream, self._downstream)
        alive = [c for c in (self._upstream.predecessor, self._downstream.connection) if c]
        received = sum(end.bytes_in for end in ends) + sum(c.bytes_in for c in alive)
        return received, sum(end.bytes_out for end in ends) + sum(c.bytes_out for c in alive)

    def _is_sending(self) -> bool:
        current, link = self._sender.current, self._downstream.connection
        return current is not None and (current.ready or (link is not None and not link.idle))

    def _is_receiving(self) -> bool:
        return self._receiver.linked and self._receiver.incoming is not None

    def _is_arriving(self, version: int) -> bool:
        incoming = self._receiver.incoming
        return self._receiver.linked and incoming is not None and incoming.version == version

    def _report_stalls(self, now: float) -> float | None:
        """Report, once each, a neighbour to or from which nothing moves although something should;
        when to look again."""
        incoming, current = self._receiver.incoming, self._sender.current
        pairs = (
            ("receiving", self._upstream.predecessor, incoming, self._upstream.peer),
            ("sending", self._downstream.connection, current, self._downstream.peer),
        )
        due = []
        for what, connection, moving, peer in pairs:
            if connection is None or moving is None or now - connection.moved_at < STALLED_S:
                self._stalls.discard(what)
                if connection is not None and moving is not None:
                    due.append(connection.moved_at + STALLED_S)
            elif what not in self._stalls:
                self._stalls.add(what)
                detail = f"{what}: nothing has moved for {STALLED_S:.0f} s"
                self._notify(Trouble("stalled", moving.version, peer, detail))
        return min(due, default=None)
