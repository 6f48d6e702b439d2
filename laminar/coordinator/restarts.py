"""The restart policy of a coordinator that ended: whether to restart it, and when.

Reads   its exit code, how long it had served, the time
Gives   Restart with a pause, or GiveUp with the failure

Pure: the supervisors of a real run and of the simulator both call it. The pause doubles while
coordinators end soon after their start. A coordinator that cannot write its log is restarted for
`disk_full_timeout_s`, without a limit on attempts; all other deaths have a limit. One that was
killed because it stood still is restarted once: if the next one stands still within
`stall_timeout_s`, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.core.state.failures import Failure, FailureKind
from laminar.events.base import COORDINATOR
from laminar.names import exit_codes

DEATHS_MAX = 20  #: the maximum deaths of one run, not counting those from a full disk
SERVED_S = 5.0
"""The time after which a coordinator counts as having worked: a repeated failure comes sooner."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.25, 10.0
"""The bounds of the second and each further pause in a row."""


@dataclass(frozen=True)
class Restart:
    """A decision to start another coordinator after the pause."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """A decision to end the run with this code; without `failure` the coordinator reported it."""

    code: int
    failure: Failure | None = None

    @classmethod
    def after_failure(cls, kind: FailureKind, subject: str, detail: str = "") -> GiveUp:
        """Give the run up after a failure that no coordinator has reported."""
        return cls(kind.record.exit_code, Failure(kind, subject, detail=detail))


class Restarts:
    """The deaths of the coordinators of one run."""

    def __init__(self, pause_s: float, disk_full_timeout_s: float, stall_timeout_s: float) -> None:
        """Set the pause before the first restart, and how long a disk may stay full."""
        self._pause_s, self._disk_wait_s = pause_s, disk_full_timeout_s
        self._stall_s = stall_timeout_s
        self._stood_still = False  #: whether the last coordinator was killed for that
        self._deaths = 0  #: deaths for other reasons than the disk
        self._in_a_row = 0  #: deaths soon after a start, in a row
        self._disk_since_s: float | None = None  #: time since which no coordinator could write

    def decide_restart(
        self, code: int, served_s: float, now_s: float, *, stood_still: bool = False
    ) -> Restart | GiveUp:
        """Decide after a coordinator ended with `code` (negative: by a signal) after `served_s`.

        `stood_still`: it was killed because it made no more turns."""
        if code in exit_codes.FINAL:
            return GiveUp(code)
        before, self._stood_still = self._stood_still, stood_still
        if before and stood_still and served_s < self._stall_s:
            what = f"it stood still again, {served_s:.0f} s after its restart for that reason"
            return GiveUp.after_failure(FailureKind.STALLED, COORDINATOR, what)
        if served_s >= SERVED_S:
            self._in_a_row, self._disk_since_s = 0, None
        self._in_a_row += 1
        if code == exit_codes.LOG_UNWRITABLE:
            return self._no_room(now_s)
        self._disk_since_s = None
        self._deaths += 1
        if self._deaths > DEATHS_MAX:
            what = f"the coordinator has died {self._deaths} times, last with code {code}"
            return GiveUp.after_failure(FailureKind.CRASHED, COORDINATOR, what)
        return Restart(self._compute_pause())

    def _no_room(self, now_s: float) -> Restart | GiveUp:
        if self._disk_since_s is None:
            self._disk_since_s = now_s
        left_s = self._disk_since_s + self._disk_wait_s - now_s
        if left_s <= 0:
            limit = f"{self._disk_wait_s:g} s (coordinator.disk_full_timeout_s)"
            what = f"the event log could not be written for {limit}"
            return GiveUp.after_failure(FailureKind.DISK_FAILED, COORDINATOR, what)
        return Restart(min(self._compute_pause(), left_s))

    def _compute_pause(self) -> float:
        if self._in_a_row == 1:
            return self._pause_s
        doubled = max(self._pause_s, PAUSE_MIN_S) * 2.0 ** min(self._in_a_row - 1, 10)
        return max(self._pause_s, min(doubled, PAUSE_MAX_S))
