"""The relay's model: the real slot table and the real choice of versions, without the weights.

Reads   requests of trainer and rollouts; what the relay before it sends; ForwardWeights, PinVersion
Emits   RelayReady, WeightsPublished, WeightsReceived, RelayLinked, TransferTrouble

A version is so many chunks. One is sent at a time, as soon as it is here (cut-through), and again
when it arrives damaged. A successor that has a part of a version names what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.sim.models.idle import Idle
from laminar.sim.scenario import seconds
from laminar.sim.scheduler import MS
from laminar.weights.chain import next_version
from laminar.weights.slots import SlotTable, VersionGone

SLOTS = 3
CHUNKS = 8
CHUNK_BYTES = 1_000_000
DIGEST_S = 0.05
CHAIN = "chain"
"""As a writer: the relay before this one."""
SLOT_POLL_NS = seconds(0.05)


class Grant(NamedTuple):
    """Ask for a slot to write to; the reply is its number, -1: none is free."""


class Commit(NamedTuple):
    """The slot holds these weights; the reply is False if it was never granted by this process."""

    slot: int
    version: int
    step: int
    digest: str


class Lease(NamedTuple):
    """Ask to read a version; the reply is a Leased or a VersionGone."""

    version: int
    exact: bool


class Leased(NamedTuple):
    boot: int  #: of the relay: another process knows nothing of this lease
    lease_id: int
    version: int
    step: int
    digest: str


class Release(NamedTuple):
    """The reply is False for a lease that had been revoked, or was another process's."""

    boot: int
    lease_id: int


class Greet(NamedTuple):
    """From the relay before, by which order; the reply is (latest, begun) or REFUSED."""

    order: int
    incarnation: int


class Offer(NamedTuple):
    """The reply: chunks that are lacking, NO_SLOT or REFUSED."""

    order: int
    weights: Commit


class Chunk(NamedTuple):
    """The reply: OK, DAMAGED or REFUSED."""

    order: int
    version: int
    number: int
    damaged: bool


OK, DAMAGED, REFUSED, NO_SLOT = "ok", "damaged", "refused", "no-slot"


@dataclass(slots=True)
class Incoming:
    """A version that comes in."""

    weights: Commit
    begun_ns: int
    have: set[int] = field(default_factory=set)  #: asked for membership and size only

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(i for i in range(CHUNKS) if i not in self.have)


@dataclass(slots=True)
class Feed:
    """The successor, and what is being sent to it."""

    order: int
    name: str
    latest: int = -1  #: complete there
    begun: int = -1
    linked: bool = False
    busy: bool = False
    version: int = -1
    missing: list[int] = field(default_factory=list)
    starving: bool = False  #: what it lacks is not here yet


class Relay(Idle):
    """The versions of one machine."""

    def start(self) -> None:
        self.slots = SlotTable(SLOTS, lambda version: version != self._sending)
        self.versions: dict[int, Commit] = {}
        self.incoming: Incoming | None = None
        self._granted: dict[str, int] = {}
        self._committing: set[int] = set()  #: asked for membership only, never walked
        self._pin = -1
        self._feed: Feed | None = None
        self._order = self._order_in = 0
        self.listens = False
        start_s = self.chance.uniform(0, self.scenario.start_s)  # also of a slow one
        self.process.after(seconds(start_s), self._ready)

    def _ready(self) -> None:
        """Whoever gets an answer from it may know that it has said so."""
        self.listens = True
        self.process.emit(ev.RelayReady(address=self.process.name, bulk=self.process.name))

    @property
    def _sending(self) -> int:
        return self._feed.version if self._feed is not None and self._feed.busy else -1

    def handle(self, order: cmd.Order, command: Command) -> None:
        if isinstance(command, cmd.ForwardWeights):
            self._forward(order.command_id, command)
        elif isinstance(command, cmd.PinVersion):
            self._pin = command.version
            self.slots.unpin()
            self._keep_pinned()

    def _keep_pinned(self) -> None:
        """A version to be kept may not be here yet."""
        if self._pin >= 0 and self.slots.pin(self._pin) is not None:
            self.world.marks.hit("relay:pin-of-a-version-not-here")

    def answer(self, client: str, request: Any) -> Any:
        if isinstance(request, Grant):
            return self._grant(client)
        if isinstance(request, Commit):
            return self._commit(client, request)
        if isinstance(request, Lease):
            return self._lease(client, request)
        if isinstance(request, Release):
            return request.boot == self.process.boot and self.slots.release(request.lease_id)
        if isinstance(request, Greet):
            return self._greeting(request)
        if isinstance(request, Offer):
            return self._take_offer(request)
        if isinstance(request, Chunk):
            return self._take_chunk(request)
        return super().answer(client, request)

    # --- processes of this machine --------------------------------------------------------------

    def _grant(self, writer: str) -> int:
        granted = self._granted.get(writer, -1)
        if granted in self._committing:
            return -1
        if granted >= 0:
            return granted
        grant = self.slots.grant(writer)
        if grant is None:
            return -1
        self._granted[writer] = grant.slot
        return grant.slot

    def _commit(self, writer: str, request: Commit) -> bool:
        if request.version <= (-1 if self.slots.latest is None else self.slots.latest):
            return True  # it is here: the trainer was asked for it twice
        if self._granted.get(writer, -1) != request.slot:
            self.world.marks.hit("relay:commit-of-a-dead-relays-slot")
            return False
        self._committing.add(request.slot)
        self.process.compute(DIGEST_S, self._digested, writer, request)
        return True

    def _digested(self, writer: str, request: Commit) -> None:
        self._complete(writer, request)
        published = ev.WeightsPublished(
            version=request.version,
            step=request.step,
            digest=request.digest,
            num_bytes=CHUNKS * CHUNK_BYTES,
            held=self.slots.versions_held,
        )
        self.process.emit(published)
        self._pump()

    def _complete(self, writer: str, weights: Commit) -> None:
        slot = self._granted.pop(writer)
        self.slots.commit(slot, writer, weights.version)
        self.versions[weights.version] = weights
        self._committing.discard(slot)
        self._keep_pinned()

    def _lease(self, reader: str, request: Lease) -> Leased | VersionGone:
        lease = self.slots.lease(request.version, reader, exact=request.exact)
        if isinstance(lease, VersionGone):
            return lease
        held = self.versions[lease.version]
        return Leased(self.process.boot, lease.lease_id, held.version, held.step, held.digest)

    def peer_lost(self, name: str) -> None:
        """A reader or writer of this machine has been silent for its lease."""
        if self.slots.revoke(name):
            self.world.marks.hit("relay:lease-revoked")

    # --- to the successor -----------------------------------------------------------------------

    def _forward(self, order: int, command: cmd.ForwardWeights) -> None:
        if order <= self._order:
            return
        self._order, self._feed = order, None
        if not command.successor:
            return self.process.emit(ev.RelayLinked(command_id=order, successor=""))
        feed = self._feed = Feed(order, command.successor)
        then = partial(self._greeted, feed)
        self.process.client.call(feed.name, Greet(order, command.incarnation), then)

    def _greeted(self, feed: Feed, reply: Any) -> None:
        if feed is not self._feed:
            return
        if reply == REFUSED:  # another process has that name now: it will be ordered anew
            trouble = ev.TransferTrouble(kind="refused", relay=feed.name, version=-1, detail="")
            return self.process.emit(trouble)
        feed.latest, feed.begun = reply
        feed.linked = True
        self.process.emit(ev.RelayLinked(command_id=feed.order, successor=feed.name))
        self._pump()

    def _pump(self) -> None:
        """Begin with the next version for the successor, if it needs one."""
        feed = self._feed
        if feed is None or not feed.linked or feed.busy:
            return
        mine = [*self.slots.versions_held]
        if self.incoming is not None:
            mine.append(self.incoming.weights.version)
        version = next_version(mine, (feed.latest,), (feed.begun,), ())
        if version is None:
            return
        incoming = self.incoming
        coming = incoming is not None and incoming.weights.version == version
        weights = incoming.weights if coming and incoming else self.versions[version]
        feed.busy, feed.version, feed.starving = True, version, False
        then = partial(self._offered, feed)
        self.process.client.call(feed.name, Offer(feed.order, weights), then)

    def _offered(self, feed: Feed, reply: Any) -> None:
        if feed is not self._feed:
            return
        if reply == REFUSED:
            self._feed = None
        elif reply == NO_SLOT:
            feed.busy = False
            self.process.after(SLOT_POLL_NS, self._pump)
        else:
            if 0 < len(reply) < CHUNKS:
                self.world.marks.hit("relay:resumed")
            feed.begun, feed.missing = feed.version, list(reply)
            self._next_chunk(feed)

    def _next_chunk(self, feed: Feed) -> None:
        """Send what is here and lacking there; wait for more of it; or go on to what is newer."""
        here = range(CHUNKS)
        incoming = self.incoming
        if feed.version not in self.slots.versions_held:
            if incoming is None or incoming.weights.version != feed.version:
                feed.busy = False  # it was given up for a newer one
                return self._pump()
            here = incoming.have  # type: ignore[assignment]
            self.world.marks.hit("relay:cut-through")
        if not feed.missing:
            feed.latest, feed.busy = max(feed.latest, feed.version), False
            return self._pump()
        index = next((i for i in feed.missing if i in here), -1)
        feed.starving = index < 0
        if index >= 0:
            chunk_s = self.scenario.transfer_s / CHUNKS
            self.process.compute(chunk_s, self._send_chunk, feed, index)

    def _send_chunk(self, feed: Feed, index: int) -> None:
        if feed is self._feed and not self.world.faults.sticks():
            damaged = self.world.faults.damages_chunk()
            chunk = Chunk(feed.order, feed.version, index, damaged)
            self.process.client.call(feed.name, chunk, partial(self._chunk_taken, feed, index))

    def _chunk_taken(self, feed: Feed, index: int, reply: str) -> None:
        if feed is not self._feed:
            return
        if reply == REFUSED:
            self._feed = None
            return
        if reply == OK:
            feed.missing.remove(index)
        self._next_chunk(feed)

    # --- from the relay before ------------------------------------------------------------------

    def _greeting(self, request: Greet) -> Any:
        if request.incarnation != self.process.link.incarnation or request.order < self._order_in:
            return REFUSED
        self._order_in = request.order
        latest = -1 if self.slots.latest is None else self.slots.latest
        return latest, -1 if self.incoming is None else self.incoming.weights.version

    def _take_offer(self, request: Offer) -> Any:
        if request.order != self._order_in:
            self.world.marks.hit("relay:stale-predecessor")
            return REFUSED
        weights, latest = request.weights, self.slots.latest
        if self._granted.get(CHAIN, -1) in self._committing:
            return NO_SLOT
        if latest is not None and weights.version <= latest:
            return ()
        if self.incoming is None or self.incoming.weights.version != weights.version:
            if self._grant(CHAIN) < 0:
                return NO_SLOT
            self.incoming = Incoming(weights, self.world.scheduler.now)
        return self.incoming.missing

    def _take_chunk(self, request: Chunk) -> str:
        incoming = self.incoming
        if request.order != self._order_in or incoming is None:
            return REFUSED
        if request.damaged:
            trouble = ev.TransferTrouble(
                kind="damaged-chunk", relay="", version=request.version, detail=""
            )
            self.process.emit(trouble)
            return DAMAGED
        incoming.have.add(request.number)
        if not incoming.missing:
            self._committing.add(self._granted[CHAIN])
            self.process.compute(DIGEST_S, self._received, incoming)
        if self._feed is not None and self._feed.starving:
            self._next_chunk(self._feed)
        self._pump()
        return OK

    def _received(self, incoming: Incoming) -> None:
        weights = incoming.weights
        self._complete(CHAIN, weights)
        self.incoming = None
        received = ev.WeightsReceived(
            version=weights.version,
            step=weights.step,
            digest=weights.digest,
            kind="full",
            num_bytes=CHUNKS * CHUNK_BYTES,
            duration_ms=(self.world.scheduler.now - incoming.begun_ns) // MS,
            held=self.slots.versions_held,
        )
        self.process.emit(received)
        if self._feed is not None and self._feed.starving:
            self._next_chunk(self._feed)
        self._pump()
