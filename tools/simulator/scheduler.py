"""Scheduler of virtual time: calls in order of their time, with no real waiting.

Reads   functions and when they are to be called, in virtual nanoseconds
Gives   the present time; calls in the order of (time, order of scheduling)

Two calls at the same instant run in the order in which they were scheduled, so a run depends on
nothing but its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

MS = 1_000_000  #: nanoseconds
SECOND = 1_000_000_000  #: nanoseconds

Action = Callable[..., Any]


class Scheduler:
    """Heap of calls. Calls that have become pointless stay in it and must check that themselves."""

    def __init__(self) -> None:
        self.now = 0  #: nanoseconds since the world began
        self._heap: list[tuple[int, int, Action, tuple[Any, ...]]] = []
        self._order = 0
        self.made = 0  #: calls so far

    def at(self, when_ns: int, action: Action, *args: Any) -> None:
        """Call `action(*args)` at a time, or at once if that has passed."""
        self._order += 1
        heappush(self._heap, (when_ns, self._order, action, args))

    def after(self, delay_ns: int, action: Action, *args: Any) -> None:
        self._order += 1
        heappush(self._heap, (self.now + delay_ns, self._order, action, args))

    def step(self) -> bool:
        """Run the next call; return False if there is none."""
        if not self._heap:
            return False
        when, _, action, args = heappop(self._heap)
        if when > self.now:
            self.now = when
        self.made += 1
        action(*args)
        return True
