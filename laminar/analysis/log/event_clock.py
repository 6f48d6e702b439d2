"""Clocks of the log: unix time of its events, and seconds since the first.

Reads   events, in the order of the log
Gives   WallClock; EventClock, with Moments; format_moment
"""

from __future__ import annotations

from typing import NamedTuple

from laminar.events import events as ev
from laminar.events.base import Stamped


class WallClock:
    """Converter of event times to Unix time.

    Times in the log are relative to the start of its coordinator. Where the beginning of the log
    was removed, all times stay relative to that unknown moment. A coordinator that starts with a
    clock that was set back continues with the time of the one before, so durations stay right.
    """

    def __init__(self) -> None:
        self._offset_ns = 0
        self._latest_ns = 0
        self._known: bool | None = None  #: whether the first event was the first of the run

    def unix_ns(self, event: Stamped) -> int:
        """Return Unix time in ns, never decreasing; call it for every event, in log order."""
        if self._known is None:
            self._known = event.seq == 1
        if self._known and isinstance(event.event, ev.CoordinatorStarted):
            offset_ns = event.event.clock_ns - event.time_ns
            self._offset_ns = max(self._offset_ns, offset_ns)
        self._latest_ns = max(self._latest_ns, event.time_ns + self._offset_ns)
        return self._latest_ns


class Moment(NamedTuple):
    """Number and time of an event."""

    seq: int
    unix_ns: int
    seconds: float  #: since the first event


class EventClock:
    """Clock of a replay; call `locate_event` for every event, in the order of the log."""

    def __init__(self) -> None:
        self.now = Moment(0, 0, 0.0)
        self.first_ns = 0  #: time of the first event
        self._clock = WallClock()

    def locate_event(self, stamped: Stamped) -> Moment:
        unix_ns = self._clock.unix_ns(stamped)
        if not self.now.seq:
            self.first_ns = unix_ns
        self.now = Moment(stamped.seq, unix_ns, (unix_ns - self.first_ns) / 1e9)
        return self.now


def format_moment(seconds: float, event: int) -> str:
    """Format a moment for display: `45.210 s (#8123)`."""
    return f"{seconds:.3f} s (#{event})"
