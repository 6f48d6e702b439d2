"""Exits of a simulated coordinator, and whether it is restarted.

Reads   the exception that ended it
Gives   the verdict of the real coordinator/restarts.py: restart, after a pause, or give up
Raises  Violation

Deaths from outside (a kill, a power cut) also reset the supervisor's restart count. A handler that
raises does not end a coordinator here: it violates the invariant nothing_raises.
"""

from __future__ import annotations

from laminar.coordinator.exit_reason import find_failure
from laminar.coordinator.restarts import SERVED_S, GiveUp, Restart, Restarts
from laminar.core.state.failures import FailureKind
from tools.simulator.context import Context
from tools.simulator.disk import PowerCut
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import SECOND


class Exits:
    """The deaths that the coordinators of one run caused themselves."""

    def __init__(self, world: Context) -> None:
        self._world = world
        self.reset()

    def reset(self) -> None:
        """Start over with a new supervisor."""
        times = self._world.config.coordinator
        self._restarts = Restarts(0.0, times.disk_full_timeout_s, times.stall_timeout_s)
        self._unwritable_ns = -1  #: start of the time in which no coordinator could write; -1: none
        self._served_ns = -1

    def serves(self) -> None:
        self._served_ns = self._world.scheduler.now

    def ended(self, error: Exception | None) -> Restart | GiveUp:
        """Return the verdict on an ended coordinator; `error` is None if it was killed."""
        now_ns, served_ns = self._world.scheduler.now, self._served_ns
        if error is None or isinstance(error, PowerCut):
            self.reset()
            return Restart(0.0)
        self._served_ns = -1
        served_s = (now_ns - served_ns) / SECOND if served_ns >= 0 else 0.0
        failure = find_failure(error)
        if failure.kind != FailureKind.DISK_FAILED:
            self._unwritable_ns = -1
        elif self._unwritable_ns < 0 or served_s >= SERVED_S:
            self._unwritable_ns = now_ns
        verdict = self._restarts.decide_restart(
            failure.kind.record.exit_code, served_s, now_ns / SECOND
        )
        if isinstance(verdict, GiveUp):
            self._disk_was_full(verdict)
        return verdict

    def _disk_was_full(self, over: GiveUp) -> None:
        """Check given_up_for_a_reason: a supervisor gives up only for a disk that stays full."""
        since_ns, wait_s = self._unwritable_ns, self._world.config.coordinator.disk_full_timeout_s
        long = since_ns >= 0 and self._world.scheduler.now - since_ns >= wait_s * SECOND
        failed = over.failure is not None and over.failure.kind == FailureKind.DISK_FAILED
        if not (long and failed and self._world.faults.full_for_good):
            raise Violation("given_up_for_a_reason", f"exit code {over.code}: {over.failure}")
