"""Wording of times, waits and decisions of repack in answers, and of the possible questions.

Reads   rows of facts
Gives   format_time, format_times, wait_lines (a wait by its reasons), one_decision, decision_lines
        (of repack), QUESTION_HINT; EventWords
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from laminar.analysis.facts.happening import abbreviate_event, describe_event
from laminar.analysis.facts.reader import Facts
from laminar.analysis.facts.repack_reasons import REASONS
from laminar.analysis.log.event_clock import format_moment
from laminar.events.base import Stamped

QUESTION_HINT = (
    "give a trajectory (0.17.3: why it moved), a replica (rollout-0: why it was idle), "
    "or a step (step-57: what it waited for)"
)

Row = Mapping[str, Any]


def format_time(row: Row, name: str) -> str:
    """Format a time of a row for display: `45.210 s (#8123)`."""
    return format_moment(row[name], row[f"{name}_event"])


def format_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def wait_lines(parts: Sequence[Row], reason: str, last: float) -> Iterable[str]:
    """Yield a line for each part of a wait: its start, length and reason.

    `reason`: name of the column that has it; `last`: the end of the log."""
    for part in parts:
        seconds = (last if part["ended"] is None else part["ended"]) - part["began"]
        detail = f": {part['detail']}" if part["detail"] else ""
        yield f"  {format_time(part, 'began')}, for {seconds:.3f} s, {part[reason]}{detail}"


def sum_by_reason(parts: Iterable[Row], last: float) -> dict[str, float]:
    """Return the seconds of each state of a replica, in order of appearance."""
    found: dict[str, float] = {}
    for part in parts:
        seconds = (last if part["ended"] is None else part["ended"]) - part["began"]
        found[part["state"]] = found.get(part["state"], 0.0) + seconds
    return found


def one_decision(row: Row) -> str:
    """Return the sentence about one decision."""
    detail = f" ({row['detail']})" if row["detail"] else ""
    return (
        f"At {format_time(row, 'searched')}, with {row['running']} trajectories of "
        f"v{row['version']}, repack found: {REASONS[row['reason']]}{detail}."
    )


def decision_lines(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the count of each reason, with the last time that it applied."""
    for reason, count in Counter(row["reason"] for row in rows).most_common():
        last = [row for row in rows if row["reason"] == reason][-1]
        detail = f" ({last['detail']})" if last["detail"] else ""
        when = f"{'at' if count == 1 else 'last at'} {format_time(last, 'searched')}"
        yield f"  {format_times(count)}, {when}: {REASONS[reason]}{detail}"


class EventWords:
    """Events of the log, read once, in words."""

    def __init__(self, facts: Facts, numbers: Iterable[int | None]) -> None:
        self._events = facts.read_events({number for number in numbers if number is not None})

    def __getitem__(self, number: int) -> Stamped:
        return self._events[number]

    def describe(self, number: int) -> str:
        """Describe an event by its naming fields and its sender."""
        return describe_event(self._events[number])

    def abbreviate(self, number: int) -> str:
        """Describe an event by its naming fields."""
        return abbreviate_event(self._events[number].event)
