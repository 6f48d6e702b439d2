"""The registry of event handlers, which register themselves.

Reads   the declarations of events (events/base.py)
Gives   handles (the decorator of a handler), HANDLING
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from laminar.core.context import Context
from laminar.core.state.state import State
from laminar.events.base import AnEvent, Event


class Handling(NamedTuple):
    """The handling of one event."""

    handler: Callable[[Context, Any], None]
    valid: Callable[[State, Any], bool]  #: whether a correct process could report it in this run
    planned: bool  #: false: no decision depends on it, and other events leave none open


HANDLING: dict[type[Event], Handling] = {}


def handles(
    event: type[AnEvent], *, valid: Callable[[State, AnEvent], bool], planned: bool = True
) -> Callable[[Callable[[Context, AnEvent], None]], Callable[[Context, AnEvent], None]]:
    """Register the handler of an event; core/validation.py has common validity checks."""

    def register(handler: Callable[[Context, AnEvent], None]) -> Callable[[Context, AnEvent], None]:
        assert event not in HANDLING, f"{event.__name__} already has a handler"
        HANDLING[event] = Handling(handler, valid, planned)
        return handler

    return register
