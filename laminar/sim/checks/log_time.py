"""Checks of the time in the log: it never goes back, and goes on as the coordinator's clock does.

Reads   the time of each event, the virtual clock
Raises  Violation

Timers are in the log's time. If it stood still, every deadline would come late, though in order.
"""

from __future__ import annotations

from laminar.core.machine import Machine
from laminar.events.base import Stamped
from laminar.sim.runtime.violation import Violation


class LogTime:
    """Where a coordinator process has begun, in the log's time and in that of the world."""

    def __init__(self) -> None:
        self._log_ns = 0
        self._world_ns = 0

    def coordinator_started(self, machine: Machine, now_ns: int) -> None:
        """A successor goes on where its predecessor's log ends: no time passes in between."""
        self._log_ns = machine.state.time_ns if machine.started else 0
        self._world_ns = now_ns

    @property
    def behind_ns(self) -> int:
        """How far it is behind the world's: it stands still while no coordinator runs."""
        return self._world_ns - self._log_ns

    def observe(self, stamped: Stamped, now_ns: int) -> None:
        """log_time_goes_on"""
        expected_ns = self._log_ns + now_ns - self._world_ns
        if stamped.time_ns != expected_ns:
            what = f"event {stamped.seq} is of {stamped.time_ns} ns, the clock says {expected_ns}"
            raise Violation("log_time_goes_on", what)
