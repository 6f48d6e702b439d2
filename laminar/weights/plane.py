"""The bulk plane of one relay: weight versions from its predecessor, on to its successor.

Reads   slots of the relay, bytes of the predecessor
Writes  slots that were granted, bytes to the successor
Emits   reports (reports.py), from its thread
Gives   Plane, PlaneOptions; PlaneError with one sentence for a user

One thread with one poll() moves all bytes, so that the relay's event loop never waits for them and
they never wait for it. Orders come in through a queue, reports go out through a callback, and only
the stock of versions is shared, under a lock that is held for look-ups.

    publish(manifest, slot)     written on this machine: goes to the successor at once
    set_successor(...)          who that is; the rest is between the two
    SlotWanted -> grant(slot)   a version comes in; Received when it is complete and verified
    forget(version)             ask before a slot is reused
"""

from __future__ import annotations

import ipaddress
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from laminar.weights.arena import ArenaError
from laminar.weights.deltas import DeltaBook
from laminar.weights.entrance import Entrance, Identity
from laminar.weights.exit import Exit, Successor
from laminar.weights.holding import Holding
from laminar.weights.manifest import Draft, Manifest
from laminar.weights.receiver import Receiver
from laminar.weights.region import Region
from laminar.weights.reports import PlaneFailed, Report, Status, Trouble
from laminar.weights.sender import Sender
from laminar.weights.stock import Stock

TICK_S = 1.0
STALLED_S = 5.0
"""Without a byte where bytes are due: reported, and left to whoever judges machines."""
_JOIN_S = 5.0


class PlaneError(RuntimeError):
    """The plane cannot do what was asked; one sentence with the thing, the value and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """What a user may choose."""

    delta_bytes_max: int = 0  #: of encoded deltas kept; 0: versions always go out whole
    send_rate: int = 0  #: bytes per second at most; 0: no limit
    congestion: str = ""  #: of TCP, by the kernel's name; empty: the machine's default


class Plane:
    """Start it, tell it what is published and who comes next, and listen to its reports."""

    def __init__(
        self,
        identity: Identity,
        region: Callable[[int], Region],
        notify: Callable[[Report], None],
        options: PlaneOptions = PlaneOptions(),
    ) -> None:
        """`region`: all bytes of a slot; asked in the plane's thread.

        `notify`: takes a report, in the plane's thread; it must return at once.
        """
        self._notify, self._region = notify, region
        self._stock = Stock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_lock = threading.Lock()  #: the descriptor below is not closed under a writer
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        book = DeltaBook(options.delta_bytes_max)
        self._sender = Sender(self._stock, book, self._arriving, self._post, notify)
        self._receiver = Receiver(self._stock, book, self._sender, region, notify)
        self._entrance = Entrance(identity, self._stock, self._receiver, notify)
        self._exit = Exit(
            identity, self._sender, notify, congestion=options.congestion, rate=options.send_rate
        )
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None
        self._next_tick = 0.0
        self._rates = (0.0, 0.0)
        self._counted = (0, 0)  #: bytes received and sent at the last tick
        self._stalls: set[str] = set()

    # --- from any thread ----------------------------------------------------------------------

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen on a numeric address and begin; the address for the predecessor's order.

        PlaneError if the address cannot be had.
        """
        try:
            ipaddress.ip_address(host)
            address = self._entrance.open(host, port)
        except (ValueError, OSError) as error:
            raise PlaneError(
                f"the relay cannot listen for weights on {host}:{port} ({error}); "
                "give it a numeric address of this machine and a free port"
            ) from None
        self._exit.source = host
        self._thread = threading.Thread(target=self._run, name="bulk-plane", daemon=True)
        self._thread.start()
        return address

    def set_successor(self, chain: int, successor: tuple[str, str, int] | None) -> None:
        """Feed relay (name, numeric host, port), or nobody.

        `chain` is the number of this order; a successor refuses a lower one than it has seen.
        """
        order = None if successor is None else Successor(*successor, chain)
        if order is not None:
            ipaddress.ip_address(order.host)
        self._post(lambda: self._exit.set(order))

    def publish(self, manifest: Manifest, slot: int) -> None:
        """A whole version was written here; its slot stays as it is until `forget` allows."""
        self._publish(Holding.published(manifest, slot, self._region(slot)))

    def publish_share(self, draft: Draft, slot: int, checksums: Mapping[int, int]) -> None:
        """Some chunks of a version were written here: their checksums, by index.

        Received follows when the rest has come from the predecessor, or SlotReturned when a newer
        version was complete before that.
        """
        self._publish(Holding.share(draft, slot, self._region(slot), checksums))

    def grant(self, slot: int) -> None:
        """The answer to SlotWanted; the slot is the plane's until Received or SlotReturned."""
        self._post(lambda: self._receiver.granted(slot))

    def deny(self, reason: str) -> None:
        """The other answer: there will never be a slot for it."""
        self._post(lambda: self._receiver.denied(reason))

    def forget(self, version: int) -> bool:
        """A complete version is about to be evicted: False while its bytes may be needed here."""
        return self._stock.forget(version)

    def status(self) -> Status:
        """What is going on now; the rates are those of the last tick."""
        incoming, current = self._receiver.incoming, self._sender.current
        received, sent = self._totals()
        return Status(
            held=tuple(sorted(self._stock.complete())),
            receiving=-1 if incoming is None else incoming.version,
            chunks_here=0 if incoming is None else incoming.num_have,
            chunks_total=0 if incoming is None else incoming.num_chunks,
            sending=-1 if current is None else current.version,
            predecessor=self._entrance.peer,
            successor=self._exit.peer,
            bytes_received=received,
            bytes_sent=sent,
            receive_rate=self._rates[0],
            send_rate=self._rates[1],
            refused=dict(self._entrance.refused + self._exit.refused),
            damaged=self._receiver.damaged,
        )

    def close(self) -> None:
        """End the thread and all connections; slots that were granted are not returned."""
        self._post(self._stop)
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        with self._inbox_lock:
            self._closed = True
            os.close(self._wake)

    def _publish(self, holding: Holding) -> None:
        # In the stock before this returns, so that `forget` knows it from now on.
        self._stock.put(holding)
        self._post(lambda: self._published(holding))

    def _post(self, order: Callable[[], None]) -> None:
        with self._inbox_lock:
            if not self._closed:
                self._inbox.append(order)
                os.eventfd_write(self._wake, 1)

    def _stop(self) -> None:
        self._closing = True

    # --- in the plane's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except ArenaError as error:
            self._notify(PlaneFailed(str(error)))
        except Exception:
            self._notify(PlaneFailed(traceback.format_exc()))
        finally:
            self._entrance.close()
            self._exit.close()

    def _turn(self) -> None:
        """Digest, send, wait, take what came."""
        more = self._receiver.work()
        self._exit.flush()
        self._entrance.flush()
        now = time.monotonic()
        due = self._exit.tick(now)
        if now >= self._next_tick:
            self._tick(now)
        until = self._next_tick if due is None else min(due, self._next_tick)
        actions = self._watch()
        for fd, events in self._poll.poll(0 if more else max(0.0, until - now) * 1000):
            actions[fd](events)
        while self._inbox:
            self._inbox.popleft()()

    def _watch(self) -> dict[int, Callable[[int], None]]:
        """Tell poll() what to wait for; what to do then, by descriptor."""
        actions: dict[int, Callable[[int], None]] = {self._wake: self._woken}
        wanted = {self._wake: int(select.POLLIN)}
        for fd, interest, action in (*self._entrance.readiness(), *self._exit.readiness()):
            actions[fd], wanted[fd] = action, interest
        for fd in self._polled.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, interest in wanted.items():
            if self._polled.get(fd) != interest:
                self._poll.register(fd, interest)
        self._polled = wanted
        return actions

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake)

    def _published(self, holding: Holding) -> None:
        self._receiver.published(holding)
        self._sender.refresh()

    def _arriving(self, version: int) -> bool:
        incoming = self._receiver.incoming
        return self._receiver.linked and incoming is not None and incoming.version == version

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        self._entrance.tick(now)
        totals = self._totals()
        received, sent = (new - old for new, old in zip(totals, self._counted, strict=True))
        self._rates, self._counted = (received / TICK_S, sent / TICK_S), totals
        self._look_for_stalls(now)

    def _look_for_stalls(self, now: float) -> None:
        """Report, once each, a neighbour with whom nothing moves although something should."""
        incoming, current = self._receiver.incoming, self._sender.current
        pairs = (
            ("receiving", self._entrance.predecessor, incoming, self._entrance.peer),
            ("sending", self._exit.connection, current, self._exit.peer),
        )
        for what, connection, moving, peer in pairs:
            if connection is None or moving is None or now - connection.moved_at < STALLED_S:
                self._stalls.discard(what)
            elif what not in self._stalls:
                self._stalls.add(what)
                detail = f"{what}: nothing has moved for {STALLED_S:.0f} s"
                self._notify(Trouble("stalled", moving.version, peer, detail))

    def _totals(self) -> tuple[int, int]:
        """Bytes received from predecessors and sent to successors, since the start."""
        ends = (self._entrance, self._exit)
        alive = [c for c in (self._entrance.predecessor, self._exit.connection) if c is not None]
        received = sum(end.bytes_in for end in ends) + sum(c.bytes_in for c in alive)
        return received, sum(end.bytes_out for end in ends) + sum(c.bytes_out for c in alive)
