"""Requests and answers between a host and the session that answers the model's turns.

Gives   Session, Effect, TurnCall; the answers NextTurn and TrajectoryDone; SessionLost,
        EnvironmentFailed; count_context_room

When a turn ends, the environment either ends the trajectory, which is then scored, or continues it
with context: the token ids that the model reads before its next turn. The types are used within a
process: actors/scoring.py sends requests, and tasks/environments/pool.py answers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from laminar.config import Config
from laminar.events.reasons import EndedBy, FailureReason
from laminar.storage.branches import Parents, count_read_again
from laminar.storage.messages import TurnOptions
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.rewards.results import RewardResult


class SessionLost(Exception):
    """The loss of a session or its answer: no retry, and no score, not even a bad one."""

    reason = FailureReason.ENV_LOST


class EnvironmentFailed(SessionLost):
    """A loss caused by the environment itself: reset failed, or a call ended the process."""

    reason = FailureReason.ENV_FAILED


class Session(NamedTuple):
    """The environment of an attempt at a prompt."""

    trajectory_id: str
    attempt: int
    seed: int  #: seed of the group, so that siblings begin alike
    row: PromptRow
    purpose: str  #: train | eval


class Effect(NamedTuple):
    """The record of a tool call."""

    call: int  #: index within its turn, from 0
    tool: str
    arguments: str  #: JSON
    status: str  #: intended | done | failed | timed-out; in the store also lost
    result: str = ""  #: text for the model
    seconds: float = 0.0  #: run time


class TurnCall(NamedTuple):
    """A request to answer a turn."""

    session: Session
    turn: int  #: index within the trajectory, from 0
    prompt_ids: tuple[int, ...]  #: prompt as the model read it
    #: parts of the response in order: whether sampled, and token ids; the last one is the turn
    parts: tuple[tuple[bool, tuple[int, ...]], ...]
    finish_reason: str  #: stop | length, as reported by the engine
    room: int  #: maximum number of token ids of the answer
    stored: tuple[Effect, ...] = ()  #: calls of this turn that the store has
    seconds: float = 0.0  #: run time of the calls of earlier turns
    parents: Parents = ()  #: the turn that each turn follows
    logprobs: bytes = b""  #: those of all sampled tokens, as the store keeps them


class NextTurn(NamedTuple):
    """An answer that continues the trajectory with another turn."""

    context: tuple[int, ...]  #: token ids that the model reads first; at least one, at most `room`
    effects: tuple[Effect, ...] = ()  #: finished calls of this turn
    parent: int | None = None  #: turn that `context` follows; -1: none; None: this turn
    options: TurnOptions = TurnOptions()  #: limits of the next turn


class TrajectoryDone(NamedTuple):
    """An answer that ends the trajectory with this turn."""

    result: RewardResult | None  #: reward, or None if the reward functions score `text`
    text: str  #: decoded last turn
    #: reason if the environment ended it, so that it counts as cut off; NONE: the model ended it
    reason: EndedBy = EndedBy.NONE
    effects: tuple[Effect, ...] = ()


def count_context_room(
    config: Config, contexts: Sequence[int], sampled: Sequence[int], parents: Parents
) -> int:
    """Return how many context tokens still fit; `contexts` and `sampled`: tokens by turn.

    The first context is the prompt, of which the tokens over its limit count. So does what branches
    read again: the rows of a trajectory are in one pass of the trainer.
    """
    if sum(sampled) >= config.data.max_response_length:
        return 0  # there is no room for another turn
    used = sum(contexts[1:]) + max(contexts[0] - config.data.max_prompt_length, 0)
    used += count_read_again(parents, [*map(add, contexts, sampled)])
    return max(config.env.max_context_tokens - used, 0)
