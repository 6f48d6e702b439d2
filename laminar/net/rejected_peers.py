"""Strangers that a server sends away: the first one is told of at once, all later ones seldom.

Reads   how many there were
Gives   Strangers

Whoever can reach a port can connect as often as he likes, and must not fill a log by it.
"""

from __future__ import annotations

from collections.abc import Callable

APART_S = 60.0
"""The time between two sentences."""


class RejectedPeers:
    """The strangers of one server; pure, the time is handed in."""

    def __init__(self, address: str, tell: Callable[[str], object]) -> None:
        self._address, self._tell = address, tell
        self._untold, self._next_s = 0, float("-inf")

    def record_rejected(self, count: int, now_s: float) -> None:
        """So many more were sent away."""
        self._untold += count
        if self._untold == 0 or now_s < self._next_s:
            return
        self._tell(
            f"refused {self._untold} connection{'s' if self._untold > 1 else ''} to "
            f"{self._address}, which did not show the secret of this run: of a process of another "
            "run, most likely, or of another program"
        )
        self._untold, self._next_s = 0, now_s + APART_S
