"""The bulk plane of one relay: weight versions from its predecessor, on to its successor.

Reads   slots of the relay, bytes of the predecessor
Writes  slots that were granted, bytes to the successor
Emits   reports (reports.py), from its thread
Gives   Plane

One thread with one poll() moves all bytes, so that the relay's event loop never waits for them and
they never wait for it. Orders come in through a queue, reports go out through a callback, and only
the table of versions is shared, under a lock that is held for look-ups. What is done in a turn is
in core.py.

    publish(manifest, slot)     written on this machine: goes to the successor at once
    set_successor(...)          who that is; the rest is between the two
    SlotWanted -> grant(slot)   a version comes in; Received when it is complete and verified
    forget(version)             ask before a slot is reused
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from laminar.weights.arena.region import ArenaError, Region
from laminar.weights.chain.core import PlaneCore, PlaneOptions, PlaneRuntime
from laminar.weights.chain.handshake import NONCE_BYTES
from laminar.weights.chain.reports import PlaneFailed, Report
from laminar.weights.chain.tcp import TcpNetwork
from laminar.weights.chain.transport import READABLE
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.version.table import VersionTable

_JOIN_S = 5.0
_DEFAULT_OPTIONS = PlaneOptions()


class Plane:
    """Start it, tell it what is published and who comes next, and listen to its reports.

    All methods return at once, and may be called from any thread.
    """

    def __init__(
        self,
        identity: RelayIdentity,
        region: Callable[[int], Region],
        notify: Callable[[Report], None],
        options: PlaneOptions = _DEFAULT_OPTIONS,
        table: VersionTable | None = None,
    ) -> None:
        """`region`: all bytes of a slot; asked in the plane's thread.

        `notify`: takes a report, in the plane's thread; it must return at once.
        """
        self._notify = notify
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_lock = threading.Lock()  #: the descriptor below is not closed under a writer
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._table = VersionTable(threading.Lock()) if table is None else table
        network = TcpNetwork(options.congestion, options.send_rate)
        world = PlaneRuntime(network, time.monotonic, _make_nonce, self._post_order, _run_in_thread)
        self._core = PlaneCore(identity, self._table, region, notify, options, world)
        self.set_successor = self._core.set_successor
        self.publish_version = self._core.publish_version
        self.publish_share = self._core.publish_share
        self.grant_slot, self.deny_slot = self._core.grant_slot, self._core.deny_slot
        self.fetch, self.fetch_into = self._core.fetch, self._core.fetch_into
        self.try_forget = self._table.try_forget
        self.get_status = self._core.get_status
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen on a numeric address and begin; the address for the predecessor's order.

        PlaneError if the address cannot be had.
        """
        address = self._core.listen(host, port)
        self._thread = threading.Thread(target=self._run, name="bulk-plane", daemon=True)
        self._thread.start()
        return address

    def close(self) -> None:
        """End the thread and all connections; slots that were granted are not returned."""
        self._post_order(self._stop)
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        with self._inbox_lock:
            self._closed = True
            os.close(self._wake)

    def _post_order(self, order: Callable[[], None]) -> None:
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
                self._run_turn()
        except ArenaError as error:
            self._notify(PlaneFailed(str(error)))
        except Exception:
            self._notify(PlaneFailed(traceback.format_exc()))
        finally:
            self._core.close()

    def _run_turn(self) -> None:
        wait_s = self._core.run_turn()
        actions = self._update_poll()
        for fd, events in self._poll.poll(None if wait_s is None else wait_s * 1000):
            actions[fd](events)
        while self._inbox:
            self._inbox.popleft()()

    def _update_poll(self) -> dict[int, Callable[[int], None]]:
        """Tell poll() what to wait for; what to do then, by descriptor."""
        actions: dict[int, Callable[[int], None]] = {self._wake: self._clear_wake}
        wanted = {self._wake: READABLE}
        for endpoint, interest, action in self._core.iter_poll_entries():
            fd = endpoint.fileno()
            actions[fd], wanted[fd] = action, interest
        for fd in self._polled.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, interest in wanted.items():
            if self._polled.get(fd) != interest:
                self._poll.register(fd, interest)
        self._polled = wanted
        return actions

    def _clear_wake(self, events: int) -> None:
        os.eventfd_read(self._wake)


def _make_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="delta", daemon=True).start()
