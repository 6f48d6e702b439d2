"""When links have something to do by themselves: a resend, an answer that is overdue.

Reads   times in nanoseconds, of whatever clock the owner has
Gives   Wakeups: the keys whose time has come, without a look at the others

A server has ten thousand links and a turn concerns a few of them. A key may be in the heap more
than once (its time moved forward) or in vain (its time moved back, or it is gone): who is woken
looks at its link, and says again when it is due.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from laminar.net.session import NEVER_NS

Key = TypeVar("Key", str, tuple[str, str])


class Wakeups(Generic[Key]):
    """Keys by the time at which they want to be looked at."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []
        self._earliest_ns: dict[Key, int] = {}  #: in the heap

    def schedule_wakeup(self, key: Key, at_ns: int) -> None:
        """Have `due` name this key at that time, or before."""
        if at_ns < self._earliest_ns.get(key, NEVER_NS):
            self._earliest_ns[key] = at_ns
            heappush(self._heap, (at_ns, key))

    def take_due(self, now_ns: int) -> list[Key]:
        """Keys whose time has come, in its order; they are not named again by themselves."""
        keys: list[Key] = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, key = heappop(self._heap)
            if self._earliest_ns.pop(key, None) is not None:
                keys.append(key)
        return keys
