"""Display form of events and commands: steps are counted from 1, scores are numbers.

Reads   an event or a command
Gives   display_fields: its fields as plain values; step_number

Internally, a step is the index of its batch, from 0, and a score is its bits, so that no decision
depends on a float. `laminar log dump --raw` and the tables of `laminar log sql` show events as
they are stored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laminar.core.state.scores import float_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event

BATCH_MESSAGES = (ev.StepCompleted, ev.BatchProposed, cmd.TrainStep, cmd.ProposeBatch)
"""Messages whose `step` is the index of a batch; in all others it counts completed steps."""


def step_number(index: int) -> int:
    """Return the number displayed for the step of the batch with this index."""
    return index + 1


def display_fields(message: Event | Command) -> dict[str, Any]:
    """Return all fields, with `type`, under their own names; `score` replaces `reward_bits`."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message, BATCH_MESSAGES):
        fields["step"] = step_number(message.step_index)
    elif isinstance(message, cmd.EndTrajectories):
        for ending in fields["endings"]:
            if ending["end"] == "trained":
                ending["step"] = step_number(ending["step"])
    elif isinstance(message, ev.TrajectoryRewarded):
        reward = float_of(message.reward_bits)
        named = (("reward", reward) if k == "reward_bits" else (k, v) for k, v in fields.items())
        return dict(named)
    return fields
