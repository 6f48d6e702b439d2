"""The load of a replica in its tail, as repack reads it and the indexes keep it."""

from __future__ import annotations

from typing import NamedTuple


class StragglerLoad(NamedTuple):
    """The work of a replica in its tail, and its capacity."""

    name: str
    kv_tokens: int  #: of what it runs
    need: int  #: tokens of cache to reckon with, here or where it goes
    longest: int  #: decode steps until it is expected to be empty
    running: int  #: trajectories
    room: int  #: for so many more
    kv_capacity: int  #: tokens
    max_batch: int  #: the most sequences of a decode step within its budget (the paper's B)
    movable: bool  #: may be emptied, and can take new work when it is
