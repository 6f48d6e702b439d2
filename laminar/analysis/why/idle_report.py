"""Report on why a replica was idle, or why repack did not empty it.

The report says what it did instead of generating, why it was refused work, and what ended that.

Reads   facts; a time, as seconds since the run's first event or as an event number
Gives   explain_replica: sentences
Raises  ConfigError for a replica or a time that the log does not have
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from laminar.analysis.facts.idle_reasons import DOWN, NO_WEIGHTS
from laminar.analysis.facts.reader import Facts
from laminar.analysis.facts.replica_facts import BUSY
from laminar.analysis.log.event_clock import format_moment
from laminar.analysis.why.wording import (
    QUESTION_HINT,
    EventWords,
    Row,
    decision_lines,
    format_time,
    format_times,
    one_decision,
    sum_by_reason,
    wait_lines,
)
from laminar.config import ConfigError
from laminar.core.scheduling.admission import NotAdmittedReason

NO_USE = (DOWN, NO_WEIGHTS, NotAdmittedReason.RUN_ENDING)
"""First reasons of idle times that belong to the start or end of the process or the run."""


class IdleTime(NamedTuple):
    """Time in which a replica ran nothing, by its parts."""

    parts: list[Row]

    @property
    def begin(self) -> int:
        """Event that began it."""
        return int(self.parts[0]["began_event"])

    @property
    def end(self) -> int | None:
        """Event that ended it; None while it lasts."""
        found: int | None = self.parts[-1]["ended_event"]
        return found

    def measure_length(self, last: float) -> float:
        ended = self.parts[-1]["ended"]
        return float((last if ended is None else ended) - self.parts[0]["began"])


def list_idle_times(rows: Iterable[Row]) -> list[IdleTime]:
    """Return the idle times among the states of one replica, in order."""
    found: dict[int, IdleTime] = {}
    for row in rows:
        if row["state"] != BUSY:
            found.setdefault(row["idle_since_event"], IdleTime([])).parts.append(row)
    return list(found.values())


def explain_replica(facts: Facts, name: str, at: str) -> Iterator[str]:
    """Yield the answer."""
    states = facts.rows("replica_states", replica=name)
    if not states:
        known = set(facts.table("replica_states", ["replica"])["replica"].to_pylist())
        listed = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"the log has no replica {name} (known: {listed}): {QUESTION_HINT}")
    asked = _find_asked(facts, at)
    times = list_idle_times(states)
    idle = _choose_time(facts, times, asked)
    if idle is None:
        yield from _busy_lines(facts, states[0], name, at, asked)
    else:
        yield from _idle_lines(facts, name, idle, longest=not at)
    yield _describe_sum(facts, times, states[0])
    yield from _repack_lines(facts, name, asked)


def _find_asked(facts: Facts, at: str) -> int | None:
    """Return the latest event up to the requested time; None if none is requested."""
    if not at:
        return None
    seq, seconds = _parse_instant(at)
    if seq <= facts.events and seconds <= facts.seconds:
        if seq > facts.begins_at:
            return seq
        numbers, times = facts.list_times()
        if count := int(np.searchsorted(times, seconds, "right")):
            return int(numbers[count - 1])
    raise ConfigError(
        f"--at {at} is outside the log: give a time from 0 s (#1) to "
        f"{format_moment(facts.seconds, facts.events)}"
    )


def _choose_time(facts: Facts, times: list[IdleTime], asked: int | None) -> IdleTime | None:
    """Return the idle time at the requested event, else the longest in the run."""
    if asked is None:
        up = [time for time in times if time.parts[0]["state"] not in NO_USE]
        return max(up, key=lambda time: time.measure_length(facts.seconds), default=None)
    for time in times:
        if time.begin <= asked and (time.end is None or asked < time.end):
            return time
    return None


def _busy_lines(facts: Facts, first: Row, name: str, at: str, asked: int | None) -> Iterator[str]:
    ready = format_time(first, "began")
    if asked is None:
        yield f"{name}, ready at {ready}, was never idle."
    elif asked < first["began_event"]:
        yield f"{name} was not ready yet: it became ready at {ready}."
    else:
        replica = facts.state_at(asked).members.replicas[name]
        running = f"{len(replica.running)} trajectories of v{replica.version}"
        yield f"{name} was not idle at {at}: it ran {running}."


def _idle_lines(facts: Facts, name: str, idle: IdleTime, *, longest: bool) -> Iterator[str]:
    first, last = idle.parts[0], idle.parts[-1]
    words = EventWords(facts, [idle.begin, idle.end])
    until = (
        format_moment(facts.seconds, facts.events)
        if idle.end is None
        else format_time(last, "ended")
    )
    yield (
        f"{name} was idle from {format_time(first, 'began')} to {until}: "
        f"{idle.measure_length(facts.seconds):.3f} s{', its longest idle time' if longest else ''}."
    )
    yield f"It started with {words.abbreviate(idle.begin)}."
    yield from wait_lines(idle.parts, "state", facts.seconds)
    if idle.end is None:
        yield "It lasts to the end of the log."
        return
    given = facts.rows("decisions", event=idle.end, type="generate-trajectory", receiver=name)
    more = f" and {len(given) - 1} more" if len(given) > 1 else ""
    trajectory = json.loads(given[0]["fields"])["trajectory"]
    yield (f"It ended with {words.describe(idle.end)}: {trajectory}{more} were dispatched to it.")


def _describe_sum(facts: Facts, times: list[IdleTime], first: Row) -> str:
    whole = sum_by_reason((part for time in times for part in time.parts), facts.seconds)
    parts = sorted(whole.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{reason} {seconds:.3f} s" for reason, seconds in parts if seconds)
    return (
        f"In total it was idle {format_times(len(times))}, for {sum(whole.values()):.3f} of "
        f"{facts.seconds - first['began']:.3f} s{': ' if listed else ''}{listed}."
    )


def _repack_lines(facts: Facts, name: str, asked: int | None) -> Iterator[str]:
    """Yield repack's decisions about the replica while it was running trajectories."""
    found = facts.rows("repack_decisions", replica=name)
    before = [row for row in found if asked is not None and row["searched_event"] <= asked]
    if before:
        yield one_decision(before[-1])
    if found:
        yield f"While it was busy, repack checked it {format_times(len(found))}:"
        yield from decision_lines(found)


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
