"""The bulk plane of a relay: forwards weight versions from its predecessor to its successor.

Reads   slots of the relay, bytes of the predecessor
Writes  slots that were granted, bytes to the successor
Emits   reports (reports.py), from its thread
Gives   Plane

A single thread with a poll() loop moves all bytes, so that transfers and the relay's event loop
never wait for each other. Orders arrive through a queue and reports leave through a callback. Only
the table of versions is shared, under a lock that is held for look-ups. Turns are in core.py.

    publish_version(manifest, slot)  a version was written here: send it to the successor
    set_successor(...)               name the successor; the two relays do the rest
    SlotWanted -> grant_slot(slot)   receive a version; Received when it is complete and verified
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


class Plane:
    """A relay's bulk plane: takes publications and orders, and reports through `notify`.

    All methods return at once and may be called from any thread.
    """

    def __init__(
        self,
        identity: RelayIdentity,
        region: Callable[[int], Region],
        notify: Callable[[Report], None],
        options: PlaneOptions,
        table: VersionTable,
    ) -> None:
        """Create the plane; both callbacks run in its thread.

        `region` maps a slot to all of its bytes; `notify` takes a report and must return at once.
        """
        self._notify = notify
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_lock = threading.Lock()  #: guard against closing the descriptor under a writer
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        network = TcpNetwork(options.congestion, options.send_rate)
        world = PlaneRuntime(network, time.monotonic, _make_nonce, self._post_order, _run_in_thread)
        self._core = PlaneCore(identity, table, region, notify, options, world)
        self.set_successor = self._core.set_successor
        self.publish_version = self._core.publish_version
        self.grant_slot, self.deny_slot = self._core.grant_slot, self._core.deny_slot
        self.fetch, self.fetch_into = self._core.fetch, self._core.fetch_into
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen and start the thread; return the address for the predecessor's order.

        Raises PlaneError if the numeric address is not available.
        """
        address = self._core.listen(host, port)
        self._thread = threading.Thread(target=self._run, name="bulk-plane", daemon=True)
        self._thread.start()
        return address

    def close(self) -> None:
        """End the thread and all connections; granted slots are not returned."""
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
        """Register the current interests with poll(); return the actions by descriptor."""
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
