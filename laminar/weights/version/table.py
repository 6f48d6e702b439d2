"""Who holds version v in this process: one table, for the code that moves bytes and the code that
owns slots.

Gives   VersionTable

The actor's event loop owns the slot table and evicts; the plane's thread sends and receives. What
must not happen is that a slot is given away while its bytes are on the wire. So both meet here, at
a lock that is only ever held for a few dictionary look-ups: a pinned version is not forgotten, and
a forgotten version cannot be pinned.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from laminar.weights.version.copy import VersionCopy


class VersionTable:
    """Copies by version. All methods may be called from any thread that its lock keeps out."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """`lock`: a new one, or none where one thread does everything (contextlib.nullcontext)."""
        self._lock = lock
        self._copies: dict[int, VersionCopy] = {}
        self._pins: Counter[int] = Counter()

    def put(self, copy: VersionCopy) -> None:
        with self._lock:
            self._copies[copy.version] = copy

    def get(self, version: int) -> VersionCopy | None:
        with self._lock:
            return self._copies.get(version)

    def remove(self, version: int) -> None:
        """Take out a version that did not become complete."""
        with self._lock:
            del self._copies[version]

    def try_forget(self, version: int) -> bool:
        """Forget a version whose slot is about to be reused: True if that is safe; it is sent no
        more then."""
        with self._lock:
            if self._pins[version]:
                return False
            self._copies.pop(version, None)
            return True

    def pin(self, version: int) -> VersionCopy | None:
        """Keep a version until it is unpinned; None if it is not here (any more)."""
        with self._lock:
            copy = self._copies.get(version)
            if copy is not None:
                self._pins[version] += 1
            return copy

    def unpin(self, version: int) -> None:
        with self._lock:
            self._pins[version] -= 1
            assert self._pins[version] >= 0, version

    def get_copies(self) -> dict[int, VersionCopy]:
        """Every version, complete or not."""
        with self._lock:
            return dict(self._copies)

    def get_complete_digests(self) -> dict[int, str]:
        """Digests of the complete versions."""
        with self._lock:
            return {v: h.digest for v, h in self._copies.items() if h.complete}

    def list_partial(self) -> tuple[int, ...]:
        """Versions of which not all is here, ascending."""
        with self._lock:
            return tuple(sorted(v for v, h in self._copies.items() if not h.complete))

    def get_latest(self) -> int:
        """The newest complete version; -1: none."""
        return max(self.get_complete_digests(), default=-1)
