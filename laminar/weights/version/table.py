"""Table of the versions in a process, shared by its slot owner and its transfer thread.

Gives   VersionTable

The actor's event loop owns the slot table and evicts; the plane's thread sends and receives. A slot
must not be reused while its bytes are being sent. Both sides therefore take this table's lock,
which is held only for a few dictionary look-ups: a pinned version is not forgotten, and a forgotten
version cannot be pinned.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from laminar.weights.version.copy import VersionCopy


class VersionTable:
    """Copies by version; all methods may be called from any thread that the lock covers."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """Take a new `lock`, or a contextlib.nullcontext if one thread does everything."""
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
        """Remove a version that did not become complete."""
        with self._lock:
            del self._copies[version]

    def try_forget(self, version: int) -> bool:
        """Forget a version before its slot is reused; return False if it is pinned."""
        with self._lock:
            if self._pins[version]:
                return False
            self._copies.pop(version, None)
            return True

    def pin(self, version: int) -> VersionCopy | None:
        """Pin a version until `unpin` and return its copy; None if it is not held."""
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
        """Return all copies, complete or not, by version."""
        with self._lock:
            return dict(self._copies)

    def get_complete_digests(self) -> dict[int, str]:
        """Return the digests of the complete versions."""
        with self._lock:
            return {v: h.digest for v, h in self._copies.items() if h.complete}

    def list_partial(self) -> tuple[int, ...]:
        """Return the incomplete versions, ascending."""
        with self._lock:
            return tuple(sorted(v for v, h in self._copies.items() if not h.complete))

    def get_latest(self) -> int:
        """Return the newest complete version, or -1 if there is none."""
        return max(self.get_complete_digests(), default=-1)
