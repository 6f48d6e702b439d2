"""Events that hosts of agents report.

Reads   nothing
Gives   one frozen struct per event, each declared with the commands that it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, ends_commands
from laminar.names.ids import TrajectoryId


class AgentReady(Event, frozen=True, kw_only=True):
    """The host can start sessions: the user's file is imported."""


@ends_commands(cmd.StartSession, cmd.ScoreTrajectories)
class TurnRequested(Event, frozen=True, kw_only=True):
    """A session requests a turn: the store has the ids that the model reads before it."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    placement: int
    turn: int  #: number of the requested turn, from 0
