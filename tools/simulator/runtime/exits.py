"""How a simulated coordinator ends by itself, and whether it is started again.

Reads   the exception that ended it; which event is to raise
Gives   the verdict of the real coordinator/restarts.py: again, after a pause, or over
Raises  Violation

A handler that raises does so after it has changed the state, as a real one may: nothing of that may
be left. Deaths from outside (a kill, a power cut) take the supervisor's count with them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from laminar.coordinator.exit_reason import exit_code_of
from laminar.coordinator.restarts import SERVED_S, GiveUp, Restart, Restarts
from laminar.coordinator.unhandled import HandlingFailed, crash_of, name_of
from laminar.core.machine import Machine
from laminar.eventlog.crashes import CRASHES_MAX, record_crash
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names import exit_codes
from laminar.names.ports import DiskError
from tools.simulator.runtime.disk import PowerCut, SimDisk
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import SECOND

if TYPE_CHECKING:
    from tools.simulator.world import World

ALWAYS = 1 << 30
SPARED = (ev.CoordinatorStarted, ev.EventGivenUp)
"""A run that cannot even begin, or end for a reason, has no books to close."""


class PlantedError(Exception):
    """What the handler raises."""


class Exits:
    """The deaths of one run's coordinators that are their own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = 0  #: how often the next event raises; 0: it does not
        self._left: dict[str, int] = {}  #: the same of chosen events, by name
        self._recorded = Counter[str]()  #: crashes that are durable, by event
        self.reset()

    def reset(self) -> None:
        """A new supervisor."""
        self._restarts = Restarts(0.0, self._world.scenario.disk_wait_s)
        self._unwritable_ns = -1  #: since when no coordinator could write; -1: the last one could
        self._served_ns = -1

    # --- events that raise --------------------------------------------------------------------

    def next_raises(self, times: int) -> None:
        """The next event that the core handles, and when it comes again; one of a run always."""
        if times != ALWAYS or ALWAYS not in (self._next, *self._left.values()):
            self._next = times

    def plant(self, machine: Machine) -> None:
        """Let chosen events raise in this coordinator."""
        handle = machine.handle

        def planted(stamped: Stamped) -> list[Command]:
            commands = handle(stamped)
            if self._raises(stamped):
                raise PlantedError("the handler fails")
            return commands

        machine.handle = planted  # type: ignore[method-assign]

    def _raises(self, stamped: Stamped) -> bool:
        if isinstance(stamped.event, SPARED):
            return False
        what = name_of(stamped.peer, stamped.incarnation, stamped.peer_seq, stamped.event)
        if self._next and what not in self._left:
            self._left[what], self._next = self._next, 0
        if not self._left.get(what):
            return False
        if self._recorded[what] >= CRASHES_MAX:
            said = f"{what} was handled again, after {self._recorded[what]} crashes"
            raise Violation("poison_event_is_given_up", said)
        self._left[what] -= self._left[what] != ALWAYS
        return True

    def gave_up(self, what: str) -> bool:
        """Whether so many coordinators have crashed on this event that it is given up."""
        return self._recorded[what] >= CRASHES_MAX

    # --- deaths -------------------------------------------------------------------------------

    def serves(self) -> None:
        self._served_ns = self._world.scheduler.now

    def keep(self, disk: SimDisk, incarnation: int, failed: HandlingFailed) -> Exception:
        """What ends the process that leaves a record of its crash."""
        try:
            record_crash(disk, crash_of(incarnation, failed))
        except (PowerCut, DiskError) as error:
            return error
        self._recorded[failed.what] += 1
        return failed

    def ended(self, error: Exception | None) -> Restart | GiveUp:
        """The coordinator has ended; None: it was killed."""
        now_ns, served_ns = self._world.scheduler.now, self._served_ns
        if error is None or isinstance(error, PowerCut):
            self.reset()
            return Restart(0.0)
        self._served_ns = -1
        served_s = (now_ns - served_ns) / SECOND if served_ns >= 0 else 0.0
        code = exit_code_of(error)
        if code != exit_codes.LOG_UNWRITABLE:
            self._unwritable_ns = -1
        elif self._unwritable_ns < 0 or served_s >= SERVED_S:
            self._unwritable_ns = now_ns
        verdict = self._restarts.ended(code, served_s, now_ns / SECOND)
        if isinstance(verdict, GiveUp):
            self._disk_was_full(verdict)
        return verdict

    def _disk_was_full(self, over: GiveUp) -> None:
        """given_up_for_a_reason: a supervisor gives up for nothing but a disk that stays full."""
        since_ns, wait_s = self._unwritable_ns, self._world.scenario.disk_wait_s
        long = since_ns >= 0 and self._world.scheduler.now - since_ns >= wait_s * SECOND
        full = over.code == exit_codes.LOG_UNWRITABLE and self._world.faults.full_for_good
        if not (long and full):
            raise Violation("given_up_for_a_reason", f"exit code {over.code}: {over.reason}")
