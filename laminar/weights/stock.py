"""The versions of one relay, seen by the thread that moves bytes and by the one that owns slots.

Gives   Stock

The actor's event loop owns the slot table and evicts; the plane's thread sends and receives. What
must not happen is that a slot is given away while its bytes are on the wire. So both meet here, at
a lock that is only ever held for a few dictionary look-ups: a pinned version is not forgotten, and
a forgotten version cannot be pinned.
"""

from __future__ import annotations

import threading
from collections import Counter

from laminar.weights.holding import Holding


class Stock:
    """Holdings by version. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holdings: dict[int, Holding] = {}
        self._pins: Counter[int] = Counter()

    def put(self, holding: Holding) -> None:
        with self._lock:
            self._holdings[holding.version] = holding

    def get(self, version: int) -> Holding | None:
        with self._lock:
            return self._holdings.get(version)

    def remove(self, version: int) -> None:
        """Take out a version that did not become complete."""
        with self._lock:
            del self._holdings[version]

    def forget(self, version: int) -> bool:
        """Its slot is about to be reused: True if that is safe, and then it is sent no more."""
        with self._lock:
            if self._pins[version]:
                return False
            self._holdings.pop(version, None)
            return True

    def pin(self, version: int) -> Holding | None:
        """Keep a version until it is unpinned; None if it is not here (any more)."""
        with self._lock:
            holding = self._holdings.get(version)
            if holding is not None:
                self._pins[version] += 1
            return holding

    def unpin(self, version: int) -> None:
        with self._lock:
            self._pins[version] -= 1
            assert self._pins[version] >= 0, version

    def all(self) -> dict[int, Holding]:
        """Every version, complete or not."""
        with self._lock:
            return dict(self._holdings)

    def complete(self) -> dict[int, str]:
        """Digests of the complete versions."""
        with self._lock:
            return {v: h.digest for v, h in self._holdings.items() if h.complete}

    def partial(self) -> tuple[int, ...]:
        """Versions of which not all is here, ascending."""
        with self._lock:
            return tuple(sorted(v for v, h in self._holdings.items() if not h.complete))

    def latest(self) -> int:
        """The newest complete version; -1: none."""
        return max(self.complete(), default=-1)
