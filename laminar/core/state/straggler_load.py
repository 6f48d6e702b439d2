"""The load of a replica with only stragglers, as repack reads it and the indexes cache it."""

from __future__ import annotations

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
