"""Wording of events and waits in answers, and of the possible questions.

Reads   events, spells of idle time
Gives   describe_event, abbreviate_event, format_times, spell_lines (a wait by its reasons),
        QUESTION_HINT
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.analysis.log.display import display_fields
from laminar.analysis.facts.trajectory_history import EventClock, Moment
from laminar.analysis.why.idle_spells import Spell
from laminar.events.base import COORDINATOR, Event, Stamped

QUESTION_HINT = (
    "give a trajectory (0.17.3: why it moved), a replica (rollout-0: why it was idle), "
    "or a step (step-57: what it waited for)"
)

NAMING_FIELDS = (
    "trajectory", "actor", "name", "node", "timer", "version", "step", "code", "reason",
)  # fmt: skip
"""Fields that distinguish events of one type."""


def describe_event(stamped: Stamped) -> str:
    """Describe an event by its naming fields and its sender."""
    sender = "" if stamped.peer == COORDINATOR else f" of {stamped.peer}"
    return f"{abbreviate_event(stamped.event)}{sender}"


def abbreviate_event(event: Event) -> str:
    """Return an event's tag and its naming fields; `laminar log dump` shows all of them."""
    fields = display_fields(event)
    named = [
        f"{key}={fields[key]}" for key in NAMING_FIELDS if fields.get(key) not in (None, "", "ok")
    ]
    return " ".join([str(fields["type"]), *named])


def format_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def spell_lines(spells: list[Spell], end: Moment, moments: EventClock) -> Iterable[str]:
    """Yield a line for each part of a wait: its start, length and reason."""
    following = [spell.since for spell in spells[1:]] + [end]
    for spell, until in zip(spells, following, strict=True):
        seconds = (until.unix_ns - spell.since.unix_ns) / 1e9
        detail = f": {spell.detail}" if spell.detail else ""
        yield f"  {moments.format_time(spell.since)}, for {seconds:.3f} s, {spell.reason}{detail}"
