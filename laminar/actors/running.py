"""A trajectory in a replica's engine: what the store does not have yet.

Gives   Running; request_id, the engine's name of a trajectory
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from laminar.events import commands as cmd
from laminar.storage import messages as m


@dataclass
class Running:
    """Tokens and log-probs that are not in the store yet, and where they begin."""

    command: cmd.GenerateTrajectory
    event_seq: int
    stored: int  #: tokens that the store has
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    finish_reason: str | None = None

    @property
    def sampled(self) -> int:
        """Tokens so far, earlier replicas' included."""
        return self.stored + len(self.tokens)

    def take_chunk(self) -> m.AppendItem:
        """Everything sampled since the last chunk."""
        item = m.AppendItem(
            trajectory_id=self.command.trajectory_id,
            placement=self.command.placement,
            offset=self.stored,
            tokens=np.asarray(self.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(self.logprobs, dtype="<f4").tobytes(),
        )
        self.stored += len(self.tokens)
        self.tokens, self.logprobs = array("i"), array("f")
        return item


def request_id(command: cmd.GenerateTrajectory) -> str:
    """A placement is part of the engine's name for it: so late tokens of an old one are
    recognised."""
    return f"{command.trajectory_id}@{command.placement}"
