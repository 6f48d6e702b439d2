"""Rate-limited reports of strangers that a server rejects: the first at once, later ones rarely.

Reads   the number of rejected connections
Gives   RejectedPeers

Anyone who can reach a port can connect as often as they like, and must not fill the log with it.
"""

from __future__ import annotations

from collections.abc import Callable

APART_S = 60.0  #: minimum time between two reports


class RejectedPeers:
    """The rejected strangers of one server; pure, the time is passed in."""

    def __init__(self, address: str, tell: Callable[[str], object]) -> None:
        self._address, self._tell = address, tell
        self._untold, self._next_s = 0, float("-inf")

    def record_rejected(self, count: int, now_s: float) -> None:
        """Count rejected connections and report them if a report is due."""
        self._untold += count
        if self._untold == 0 or now_s < self._next_s:
            return
        self._tell(
            f"refused {self._untold} connection{'s' if self._untold > 1 else ''} to "
            f"{self._address} without the secret of this run, probably from another run or "
            "another program"
        )
        self._untold, self._next_s = 0, now_s + APART_S
