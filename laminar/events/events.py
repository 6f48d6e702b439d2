"""EVENTS: every event, under one name for all modules that handle or report it.

Reads   nothing
Gives   the events of the modules below; ALL_EVENTS, in the order in which they are declared

An event never carries payloads (tokens, weights): it names data that is already durable elsewhere.
"""

from __future__ import annotations

from laminar.events.base import REPORTED_BY, Event
from laminar.events.of_actors import *  # noqa: F403
from laminar.events.of_coordinator import *  # noqa: F403
from laminar.events.of_relay import *  # noqa: F403
from laminar.events.of_rollout import *  # noqa: F403
from laminar.events.of_trainer import *  # noqa: F403

ALL_EVENTS: tuple[type[Event], ...] = tuple(REPORTED_BY)
