"""Data: the prompts of the run, and the place in them.

Reads   nothing
Gives   Data
"""

from __future__ import annotations

import msgspec

from laminar.events.of_coordinator import ForkOrigin
from laminar.names.ids import GroupId


class Data(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The prompts of a run, and what it continues if it is a fork."""

    num_train: int = -1  #: -1 until the store has loaded the data
    num_eval: int = 0
    cursor: int = 0  #: next (pass * num_train + position) to dispatch
    origin: ForkOrigin | None = None  #: origin of a fork (core/state/forks.py)
    #: prompts that the origin of a fork had not ended, row index by group: dispatched first
    unfinished_prompts: dict[GroupId, int] = {}

    @property
    def first_version(self) -> int:
        """The version of the weights that the run begins with."""
        return self.origin.version if self.origin is not None else 0

    @property
    def first_step(self) -> int:
        """The completed steps at the start of the run."""
        return self.origin.step if self.origin is not None else 0
