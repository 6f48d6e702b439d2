"""What passes between a replica and the environment that answers a turn of the model.

Gives   Session, Effect, TurnCall; GoesOn or Done, the two answers; SessionLost,
        EnvironmentFailed

A turn that has ended is scored, and the environment may answer in place of a score that it goes on:
with context, the token ids that the model reads before its next turn. So nothing here is a message
of its own process: actors/scoring.py asks, tasks/environments/pool.py answers.
"""

from __future__ import annotations

from typing import NamedTuple

from laminar.events.reasons import EndedBy, FailureReason
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.rewards.results import RewardResult


class SessionLost(Exception):
    """The session is gone, or its answer is: what it did is not done again, and there is no score,
    not even a bad one."""

    reason = FailureReason.ENV_LOST


class EnvironmentFailed(SessionLost):
    """The environment itself has lost it: no reset, or a process that ended in a call."""

    reason = FailureReason.ENV_FAILED


class Session(NamedTuple):
    """The environment of one attempt at one prompt."""

    trajectory_id: str
    attempt: int
    seed: int  #: of the group: siblings begin alike
    row: PromptRow
    purpose: str  #: train | eval


class Effect(NamedTuple):
    """One call of a tool."""

    call: int  #: which of its turn, from 0
    tool: str
    arguments: str  #: JSON
    status: str  #: intended | done | failed | timed-out; of the store also lost
    result: str = ""  #: what the model is told
    seconds: float = 0.0  #: that it took


class TurnCall(NamedTuple):
    """A turn that wants an answer."""

    session: Session
    turn: int  #: of the trajectory, from 0
    prompt_ids: tuple[int, ...]  #: as the model read them
    #: (whether the model sampled them, token ids) in order; the last one is the turn
    parts: tuple[tuple[bool, tuple[int, ...]], ...]
    finish_reason: str  #: stop | length, as the engine said of this turn
    room: int  #: token ids that the answer may have
    stored: tuple[Effect, ...] = ()  #: calls of this turn that the store knows
    seconds: float = 0.0  #: that the calls of the turns before took


class NextTurn(NamedTuple):
    """The model takes another turn."""

    context: tuple[int, ...]  #: what it reads before; at least one, at most `room`
    effects: tuple[Effect, ...] = ()  #: of this turn, each with its end


class TrajectoryDone(NamedTuple):
    """The trajectory has ended with this turn."""

    result: RewardResult | None  #: None: the reward functions score `text`
    text: str  #: the whole of it, for people
    #: why the environment ended it: it then counts as cut off; NONE: the model did
    reason: EndedBy = EndedBy.NONE
    effects: tuple[Effect, ...] = ()
