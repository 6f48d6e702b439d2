"""Logic of a relay's bulk plane, independent of its thread, sockets and clock.

Reads   slots of the relay, frames of its neighbours
Writes  slots that were granted, frames to its neighbours
Emits   reports (reports.py)
Gives   PlaneCore, PlaneOptions; PlaneError with one sentence for a user

The owner repeats a turn: call `run_turn`, wait for the endpoints of `iter_poll_entries` for at most
the time that `run_turn` returned, run the actions of those that are ready, then run posted orders.
transfer_thread.py does this with a thread and poll(), the simulator in virtual time.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar.weights.arena.region import Region
from laminar.weights.chain.downstream import Downstream, Successor
from laminar.weights.chain.fetch import Fetcher, VersionHolder
from laminar.weights.chain.receiver import Receiver
from laminar.weights.chain.reports import Report, Trouble
from laminar.weights.chain.sender import Sender
from laminar.weights.chain.transport import Network
from laminar.weights.chain.upstream import PollEntry, RelayIdentity, Upstream
from laminar.weights.delta.cache import DeltaCache
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.manifest import Manifest
from laminar.weights.version.table import VersionTable

STALLED_S = 5.0  #: time without a byte, while bytes are due, after which a stall is reported


class PlaneError(RuntimeError):
    """A request that the plane cannot meet; the message has the value and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """The user's options."""

    delta_bytes_max: int = 0  #: limit of the cached deltas; 0: versions are always sent whole
    send_rate: int = 0  #: maximum bytes per second; 0: no limit
    congestion: str = ""  #: TCP congestion control by its kernel name; empty: system default


@dataclass(frozen=True, slots=True)
class PlaneRuntime:
    """The environment of the core: network, clock, randomness and threads."""

    network: Network
    clock: Callable[[], float]  #: monotonic seconds
    nonce: Callable[[], bytes]  #: source of NONCE_BYTES that were never used before
    post: Callable[[Callable[[], None]], None]  #: queue of orders for the end of a turn
    #: runner of long work in a separate thread
    beside: Callable[[Callable[[], None]], None]


class PlaneCore:
    """The upstream and downstream sides of a relay and the state between them.

    Owned by the code that runs its turns; the orders are thread-safe.
    """

    def __init__(
        self,
        identity: RelayIdentity,
        table: VersionTable,
        region: Callable[[int], Region],
        notify: Callable[[Report], object],
        options: PlaneOptions,
        world: PlaneRuntime,
    ) -> None:
        """Connect the parts; `region` maps a slot to its bytes, `notify` must return at once."""
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
        """Listen on a numeric address; return the address for the predecessor's order.

        Raises PlaneError if the address is not available.
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

    # --- orders: carried out in the next turn ---------------------------------------------------

    def set_successor(self, chain: int, successor: tuple[str, str, int] | None) -> None:
        """Send versions to this relay (name, numeric host, port), or to none.

        `chain` is the number of this order; a successor refuses numbers lower than it has seen.
        """
        order = None if successor is None else Successor(*successor, chain)
        if order is not None:
            ipaddress.ip_address(order.host)
        self._world.post(lambda: self._downstream.set_successor(order))

    def publish_version(self, manifest: Manifest, slot: int) -> None:
        """Publish a whole version written here; its slot stays unchanged until `try_forget`."""
        copy = VersionCopy(manifest, slot, self._region(slot), complete=True)
        self._table.put(copy)  # before this returns, so that `try_forget` sees the version
        self._world.post(lambda: self._announce_copy(copy))

    def grant_slot(self, slot: int) -> None:
        """Answer SlotWanted; the plane owns the slot until Received or SlotReturned."""
        self._world.post(lambda: self._receiver.take_slot(slot))

    def deny_slot(self, reason: str) -> None:
        """Answer SlotWanted: there will never be a slot for the version."""
        self._world.post(lambda: self._receiver.decline_offer(reason))

    def fetch(self, version: int, holder: tuple[str, str, int]) -> None:
        """Fetch this version from a relay (name, numeric host, port), outside the chain.

        SlotWanted, then Received or NotFetched, follow.
        """
        order = VersionHolder(version, *holder)
        ipaddress.ip_address(order.host)
        self._world.post(lambda: self._fetcher.fetch(order))

    def fetch_into(self, slot: int) -> None:
        """Answer SlotWanted of a fetch; a negative slot means that there will be none."""
        self._world.post(lambda: self._fetcher.take_slot(slot))

    def _announce_copy(self, copy: VersionCopy) -> None:
        self._receiver.handle_publish(copy)
        self._sender.refresh_offer()

    # --- turns --------------------------------------------------------------------------------

    def run_turn(self) -> float | None:
        """Hash and send; return the seconds until the next turn, or None to wait for events."""
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
        """Yield the endpoints to poll, with their interest and action."""
        yield from self._upstream.iter_poll_entries()
        yield from self._downstream.iter_poll_entries()
        yield from self._fetcher.iter_poll_entries()

    def _is_sending(self) -> bool:
        current, link = self._sender.current, self._downstream.connection
        return current is not None and (current.ready or (link is not None and not link.idle))

    def _is_receiving(self) -> bool:
        return self._receiver.linked and self._receiver.incoming is not None

    def _is_arriving(self, version: int) -> bool:
        incoming = self._receiver.incoming
        return self._receiver.linked and incoming is not None and incoming.version == version

    def _report_stalls(self, now: float) -> float | None:
        """Report each stalled neighbour once; return when to check again."""
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
                detail = f"{what}: no progress for {STALLED_S:.0f} s"
                self._notify(Trouble("stalled", moving.version, peer, detail))
        return min(due, default=None)
