"""What is done with every event: filled by the handlers, which register themselves.

Reads   the declarations of events (events/base.py)
Gives   handles (the decorator of a handler), HANDLING, ENDS_RUN and LOSES_ACTOR

A handler says what makes its event valid and what it may lead to. `leads_to` is what the handler,
and planning after it, may decide; a test holds it against thousands of random situations, and the
simulator counts which of it its runs have met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from laminar.core.context import Context
from laminar.core.state import State
from laminar.events import commands as cmd
from laminar.events.base import REPORTED_BY, AnEvent, Command, Event, Roles

Commands = tuple[type[Command], ...]

ENDS_RUN: Commands = (cmd.EndTrajectories, cmd.AbortTrajectories, cmd.StopActor)
"""The run fails: what is open ends as dropped, or, when nothing is open, all processes stop."""
LOSES_ACTOR: Commands = (
    cmd.GenerateTrajectory,
    cmd.ScoreTrajectories,
    cmd.EndTrajectories,
    cmd.AbortTrajectories,
    cmd.PullWeights,
    cmd.PinVersion,
    cmd.TrainStep,
    cmd.ProposeBatch,
    cmd.ExportModel,
    cmd.StopActor,
    cmd.ForwardWeights,
)
"""A replica's work is placed elsewhere, scored elsewhere or given up, and what is given up may
complete a batch, an evaluation or the data; without another role the run fails."""


class Handling(NamedTuple):
    """The handling of one event."""

    handler: Callable[[Context, Any], None]
    valid: Callable[[State, Any], bool]  #: false: no correct process could report it in this run
    senders: Roles
    leads_to: Commands
    planned: bool  #: false: no decision depends on it, and none is left after any other event


HANDLING: dict[type[Event], Handling] = {}


def handles(
    event: type[AnEvent],
    *,
    valid: Callable[[State, AnEvent], bool],
    leads_to: Commands = (),
    planned: bool = True,
) -> Callable[[Callable[[Context, AnEvent], None]], Callable[[Context, AnEvent], None]]:
    """Register the handler of an event (core/validation.py: what can be asked of one)."""

    def register(handler: Callable[[Context, AnEvent], None]) -> Callable[[Context, AnEvent], None]:
        assert event not in HANDLING, f"{event.__name__} has a handler"
        HANDLING[event] = Handling(handler, valid, REPORTED_BY[event], leads_to, planned)
        return handler

    return register
