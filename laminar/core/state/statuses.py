"""The phase of a run, and the status of a trajectory or a group: one enumeration each.

Reads   nothing
Gives   Phase, TrajectoryStatus, GroupStatus; transitions.py has their meanings and moves;
        encode_default
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Phase(StrEnum):
    """The phases of a run, in order."""

    STARTING = "starting"
    RUNNING = "running"
    EXPORTING = "exporting"
    FINAL_EVALUATION = "final-evaluation"
    ENDING = "ending"
    STOPPING = "stopping"
    ENDED = "ended"


class TrajectoryStatus(StrEnum):
    """The progress of one attempt at one prompt."""

    DISPATCHED = "dispatched"
    RUNNING = "running"
    GENERATED = "generated"
    REWARDED = "rewarded"
    RELEASING = "releasing"
    LOST = "lost"
    ENDING = "ending"
    WAITING = "waiting"


class GroupStatus(StrEnum):
    """The progress of the siblings of one prompt."""

    OPEN = "open"
    READY = "ready"
    CHOSEN = "chosen"
    ENDING = "ending"


def encode_default(value: StrEnum) -> Any:
    """Return a default that is kept in the encoding, as when it was a plain text."""
    return msgspec.field(default_factory=lambda: value)
