"""EVENTS: every event, under one name for all modules that handle or report it.

Reads   nothing
Gives   the events of the modules below; ALL_EVENTS, in the order in which they are declared;
        REPORTED_BY

An event never carries payloads (tokens, weights): it names data that is already durable elsewhere.
"""

from __future__ import annotations

from laminar.events.base import Event, get_tag
from laminar.events.of_actors import *  # noqa: F403
from laminar.events.of_agents import *  # noqa: F403
from laminar.events.of_coordinator import *  # noqa: F403
from laminar.events.of_relay import *  # noqa: F403
from laminar.events.of_rollout import *  # noqa: F403
from laminar.events.of_trainer import *  # noqa: F403
from laminar.names.roles import find_roles

ALL_EVENTS: tuple[type[Event], ...] = tuple(
    sorted(Event.__subclasses__(), key=lambda event: event.__module__)  # in any order of imports
)
REPORTED_BY = {kind: find_roles(get_tag(kind)) for kind in ALL_EVENTS}
"""Roles that may report each event: the machine refuses it from others."""
