"""Repack: the view of replicas and trajectories on which migrations are decided.

Reads   nothing
Gives   Repack and its parts RepackState, MigrationProgress; StragglerLoad, NotStragglerReason and
        StayReason, with which it explains its decisions
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from laminar.names.ids import TrajectoryId


class RepackState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Repack's view of one replica: its engine's last reported gauges, and its migrations."""

    max_batch: int = 0  #: most sequences of a decode step within its budget; 0: unknown
    kv_capacity: int = 0  #: tokens
    kv_used: int = 0  #: tokens
    waiting: int = 0  #: trajectories waiting for a slot in the engine
    known_command_id: int = 0  #: highest id of a command to generate that these figures cover
    last_command_id: int = 0  #: id of the last command to generate that it was given
    #: released trajectories that have not started elsewhere; until then it takes no work and loads
    #: nothing
    outgoing: dict[TrajectoryId, None] = {}
    #: trajectories of other replicas for which room is reserved
    incoming: dict[TrajectoryId, None] = {}


class MigrationProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Repack's view of one trajectory: its progress, and the replicas it migrates between."""

    prompt_tokens: int = 0
    sampled: int = 0  #: tokens as last reported; the ledger counts Trajectory.num_tokens
    migrations: int = 0  #: times that it was released
    source: str = ""  #: replica that releases it, until it has started elsewhere
    destination: str = ""  #: replica with reserved room; empty: none, or it is gone


class Repack(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Progress of open trajectories and lengths of finished ones, with repack only."""

    progress: dict[TrajectoryId, MigrationProgress] = {}
    finished: int = 0  #: trajectories generated to their end
    finished_tokens: int = 0  #: their tokens


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
