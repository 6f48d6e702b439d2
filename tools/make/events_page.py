"""docs/events.md: every event and command, from the code that declares them.

    python -m tools.make.events_page > docs/events.md

A test compares the page with the output of this program.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.core.machine import HANDLING
from laminar.events.base import ENDS, get_tag
from laminar.events.commands import ALL_COMMANDS
from laminar.events.events import ALL_EVENTS, REPORTED_BY
from laminar.names.roles import find_roles


def markdown() -> str:
    """List events with their senders, handlers and commands, then commands with what ends them."""
    lines = ["# Events and commands", "", "Made by `python -m tools.make.events_page`.", ""]
    lines += ["## Events", ""]
    for event in ALL_EVENTS:
        handler = HANDLING[event].handler
        lines += [
            f"### {_name(event)}",
            "",
            _first_line(event),
            "",
            f"- Reported by: {', '.join(REPORTED_BY[event])}",
            f"- Ends: {_names(ENDS.get(event, ())) or 'nothing'}",
            f"- Handled by: `{handler.__module__}.{handler.__qualname__}`",
            "",
        ]
    lines += ["## Commands", ""]
    for command in ALL_COMMANDS:
        ended_by = _names(event for event in ALL_EVENTS if command in ENDS.get(event, ()))
        lines += [
            f"### {_name(command)}",
            "",
            _first_line(command),
            "",
            f"- Carried out by: {', '.join(find_roles(get_tag(command)))}",
            f"- Ended by: {ended_by or 'nothing; losing it breaks nothing'}",
            "",
        ]
    return "\n".join(lines)


def _name(kind: type) -> str:
    return f"`{get_tag(kind)}`"


def _names(kinds: Iterable[type]) -> str:
    return ", ".join(map(_name, kinds))


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().replace("\n", " ").split("  ")[0]


if __name__ == "__main__":
    print(markdown(), end="")
