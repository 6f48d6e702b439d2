"""Timers of links: when each needs attention for a resend or an overdue answer.

Reads   times in nanoseconds, of any clock
Gives   Wakeups: the keys whose time has come, without scanning the others

A server has ten thousand links, and a turn concerns a few of them. A key may be in the heap several
times (its time moved forward) or needlessly (its time moved back, or it is gone): the woken owner
checks its link, and schedules the next wakeup.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from laminar.net.session import NEVER_NS

Key = TypeVar("Key", str, tuple[str, str])


class Wakeups(Generic[Key]):
    """Keys by the time of their next wakeup."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []
        self._earliest_ns: dict[Key, int] = {}  #: earliest time in the heap

    def schedule_wakeup(self, key: Key, at_ns: int) -> None:
        """Have `take_due` return this key at that time, or before."""
        if at_ns < self._earliest_ns.get(key, NEVER_NS):
            self._earliest_ns[key] = at_ns
            heappush(self._heap, (at_ns, key))

    def take_due(self, now_ns: int) -> list[Key]:
        """Return the keys whose time has come, in order, and forget them."""
        keys: list[Key] = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, key = heappop(self._heap)
            if self._earliest_ns.pop(key, None) is not None:
                keys.append(key)
        return keys
