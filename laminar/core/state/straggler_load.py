"""The load of a replica with only stragglers, as repack reads it, and why it stays."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class StragglerLoad(NamedTuple):
    """The work of a replica with only stragglers, and its capacity."""

    name: str
    kv_tokens: int  #: cached tokens of its running trajectories
    need: int  #: expected cache tokens, here or at a destination
    longest: int  #: decode steps until it is expected to be empty
    running: int  #: trajectories
    room: int  #: free slots
    kv_capacity: int  #: tokens
    max_batch: int  #: most sequences of a decode step within its budget (the paper's B)
    movable: bool  #: whether it may be emptied, and could then take new work


class NotStragglerReason(StrEnum):
    """The reasons why a serving replica does not count as having only stragglers."""

    ADMITS = "admits"
    NO_GAUGES = "no-gauges"
    WAITING = "waiting"
    STREAMING = "streaming"
    EMPTY = "empty"
    FULL = "full"


class StayReason(StrEnum):
    """The reasons why repack leaves stragglers where they are."""

    RECEIVES = "receives"
    NO_NEWER_WEIGHTS = "no-newer-weights"
    WEIGHTS_NOT_HERE = "weights-not-here"
    EVALUATION = "evaluation"
    EVALUATION_SAMPLE = "evaluation-sample"
    BATCH_WAITS = "batch-waits"
    CAUSED_LOSSES = "caused-losses"
    MIGRATED_OFTEN = "migrated-often"
    ALONE = "alone"
    NO_ROOM = "no-room"
    NO_GAIN = "no-gain"
