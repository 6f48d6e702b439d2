"""Whether a coordinator that ended is started again, and when.

Reads   its exit code, how long it had served, the time
Gives   Restart with a pause, or GiveUp with the reason

Pure: the supervisor of a real run and the simulator's ask it alike. The pause doubles while
coordinators end soon after their start. One that cannot write its log is tried again for
`disk_wait_s`, however often that is; for all other deaths there is a limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.names import exit_codes

DEATHS_MAX = 20
"""Deaths of one run, those for want of room on the disk not counted."""
SERVED_S = 5.0
"""What a coordinator repeats after a start, it repeats sooner; one that lived longer had worked."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.25, 10.0
"""Bounds of the second and each further pause in a row."""


@dataclass(frozen=True)
class Restart:
    """Start another one after the pause."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """The run has ended with this code; `reason` is empty where the coordinator has said it."""

    code: int
    reason: str = ""


class Restarts:
    """The deaths of the coordinators of one run."""

    def __init__(self, pause_s: float, disk_wait_s: float) -> None:
        """`pause_s`: before the first restart. `disk_wait_s`: how long a disk may stay full."""
        self._pause_s, self._disk_wait_s = pause_s, disk_wait_s
        self._deaths = 0  #: for other reasons than the disk
        self._in_a_row = 0  #: that ended soon after their start
        self._disk_since_s: float | None = None  #: since when none could write

    def decide_restart(self, code: int, served_s: float, now_s: float) -> Restart | GiveUp:
        """A coordinator ended with `code` (negative: by a signal) after serving so long."""
        if code in exit_codes.FINAL:
            return GiveUp(code)
        if served_s >= SERVED_S:
            self._in_a_row, self._disk_since_s = 0, None
        self._in_a_row += 1
        if code == exit_codes.LOG_UNWRITABLE:
            return self._no_room(now_s)
        self._disk_since_s = None
        self._deaths += 1
        if self._deaths > DEATHS_MAX:
            return GiveUp(
                code if code > 0 else exit_codes.CRASHED,
                f"the coordinator has died {self._deaths} times, at last with code {code}",
            )
        return Restart(self._compute_pause())

    def _no_room(self, now_s: float) -> Restart | GiveUp:
        if self._disk_since_s is None:
            self._disk_since_s = now_s
        left_s = self._disk_since_s + self._disk_wait_s - now_s
        if left_s <= 0:
            return GiveUp(
                exit_codes.LOG_UNWRITABLE,
                f"the event log could not be written for {self._disk_wait_s:g} s "
                "(coordinator.disk_wait_s)",
            )
        return Restart(min(self._compute_pause(), left_s))

    def _compute_pause(self) -> float:
        if self._in_a_row == 1:
            return self._pause_s
        doubled = max(self._pause_s, PAUSE_MIN_S) * 2.0 ** min(self._in_a_row - 1, 10)
        return max(self._pause_s, min(doubled, PAUSE_MAX_S))
