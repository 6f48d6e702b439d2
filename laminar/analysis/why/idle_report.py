"""Report on why a replica was idle, or why repack did not empty it.

The report says what it did instead of generating, why it was refused work, and what ended that.

Reads   a replay; a time, as seconds since the run's first event or as an event number
Gives   IdleReport, an observer that ends with sentences
Raises  ConfigError for a replica or a time that the log does not have
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from laminar.analysis.facts.trajectory_history import EventClock, Moment
from laminar.analysis.why import wording
from laminar.analysis.why.idle_spells import DOWN, NO_WEIGHTS, IdlePeriod, IdleTracker
from laminar.analysis.why.repack_decisions import RepackDecisions, look_lines, one_look
from laminar.config import ConfigError
from laminar.core.scheduling.admission import NotAdmittedReason
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events.base import Command, Stamped

NO_USE = (DOWN, NO_WEIGHTS, NotAdmittedReason.RUN_ENDING)
"""First reasons of idle times that belong to the start or end of the process or the run."""


class _PeriodEnd(NamedTuple):
    """End of an idle time."""

    size: int
    first: str


class IdleReport:
    """Idle times of one replica, and the selection of the requested one."""

    def __init__(self, name: str, at: str) -> None:
        self.name, self.at = name, at
        self._seq, self._seconds = _parse_instant(at)
        self._moments, self._idleness = EventClock(), IdleTracker()
        self._asked: Moment | None = None  #: latest event up to the requested time
        self._running = ""  #: activity at that time
        self._times: list[IdlePeriod] = []
        self._work: dict[int, _PeriodEnd] = {}  #: by the event that ended an idle time
        self._looks = RepackDecisions()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self._moments.locate_event(stamped)
        self._looks.record_event(now, stamped, commands, state, {self.name})
        for idle in self._idleness.record_event(now, stamped, state):
            if idle.replica == self.name:
                self._times.append(idle)
                given = [
                    c.trajectory_id
                    for c in commands
                    if isinstance(c, cmd.GenerateTrajectory) and c.to == self.name
                ]
                self._work[stamped.seq] = _PeriodEnd(len(given), given[0])
        if now.seq <= self._seq or self._moments.seconds_since_start(now) <= self._seconds:
            replica = state.members.replicas.get(self.name)
            self._asked = now
            if replica is not None:
                self._running = f"{len(replica.running)} trajectories of v{replica.version}"

    def format_lines(self) -> Iterable[str]:
        if self.name not in self._idleness.known:
            known = ", ".join(sorted(self._idleness.known)) or "none"
            raise ConfigError(
                f"the log has no replica {self.name} (known: {known}): {wording.QUESTION_HINT}"
            )
        if still := self._idleness.open.get(self.name):
            self._times.append(still)
        idle = self._choose_period()
        if idle is None:
            yield from self._busy_lines()
        else:
            yield from self._idle_lines(idle)
        yield from self._sum_lines()
        yield from self._decision_lines()

    def _choose_period(self) -> IdlePeriod | None:
        """Return the idle time at the requested instant, else the longest in the run."""
        if not self.at:
            up = [t for t in self._times if t.spells[0].reason not in NO_USE]
            return max(up, key=self._length_ns, default=None)
        last = self._moments.now
        if self._asked is None or max(self._seq, 0) > last.seq or self._seconds > self._end_s():
            raise ConfigError(
                f"--at {self.at} is outside the log: give a time from 0 s (#1) to "
                f"{self._moments.format_time(last)}"
            )
        for idle in self._times:
            if idle.begin.seq <= self._asked.seq and (
                idle.end is None or self._asked.seq < idle.end.seq
            ):
                return idle
        return None

    def _end_s(self) -> float:
        return self._moments.seconds_since_start(self._moments.now)

    def _length_ns(self, idle: IdlePeriod) -> int:
        return (idle.end or self._moments.now).unix_ns - idle.begin.unix_ns

    def _busy_lines(self) -> Iterable[str]:
        ready = self._idleness.known[self.name]
        ready_at = self._moments.format_time(ready)
        if not self.at:
            yield f"{self.name}, ready at {ready_at}, was never idle."
        elif self._asked is not None and self._asked.seq < ready.seq:
            yield f"{self.name} was not ready yet: it became ready at {ready_at}."
        else:
            yield f"{self.name} was not idle at {self.at}: it ran {self._running}."

    def _decision_lines(self) -> Iterable[str]:
        """Yield repack's decisions about the replica while it was running trajectories."""
        looks = self._looks.of.get(self.name, [])
        asked = self._asked
        last = [look for look in looks if asked is not None and look.at.seq <= asked.seq]
        if self.at and last:
            yield from one_look(last[-1], self._moments)
        if looks:
            yield f"While it was busy, repack checked it {wording.format_times(len(looks))}:"
            yield from look_lines(looks, self._moments)

    def _idle_lines(self, idle: IdlePeriod) -> Iterable[str]:
        at, last = self._moments.format_time, self._moments.now
        longest = "" if self.at else ", its longest idle time"
        yield (
            f"{self.name} was idle from {at(idle.begin)} to {at(idle.end or last)}: "
            f"{self._length_ns(idle) / 1e9:.3f} s{longest}."
        )
        yield f"It started with {wording.abbreviate_event(idle.begun_by)}."
        yield from wording.spell_lines(idle.spells, idle.end or last, self._moments)
        if idle.end is None or idle.ended_by is None:
            yield "It lasts to the end of the log."
            return
        work = self._work[idle.end.seq]
        more = f" and {work.size - 1} more" if work.size > 1 else ""
        event = wording.describe_event(idle.ended_by)
        yield f"It ended with {event}: {work.first}{more} were dispatched to it."

    def _sum_lines(self) -> Iterable[str]:
        last = self._moments.now
        whole: dict[str, int] = {}
        for idle in self._times:
            for reason, ns in idle.sum_by_reason(last).items():
                whole[reason] = whole.get(reason, 0) + ns
        life_s = (last.unix_ns - self._idleness.known[self.name].unix_ns) / 1e9
        parts = sorted(whole.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{reason} {ns / 1e9:.3f} s" for reason, ns in parts if ns)
        yield (
            f"In total it was idle {wording.format_times(len(self._times))}, for "
            f"{sum(whole.values()) / 1e9:.3f} of {life_s:.3f} s{': ' if listed else ''}{listed}."
        )


def _parse_instant(at: str) -> tuple[int, float]:
    """Return (event number, seconds) of the instant; the one that is not given is -1."""
    try:
        if at.startswith("#"):
            return int(at[1:]), -1.0
        return -1, float(at) if at else -1.0
    except ValueError:
        raise ConfigError(
            f"--at {at!r} is not a time: give seconds since the run's first event (45.2) or an "
            "event (#1234)"
        ) from None
