"""Turns and contexts of a trajectory, as engines and an environment derive them from its seed.

Reads   a Scenario
Gives   Made, made_of; prompt_with

An environment of the simulator answers the same wherever and whenever it is asked, so a trajectory
that several replicas and sessions made in turn can be compared with an undisturbed one. Engines,
the environment's model and the checks of contents share this file.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from laminar.actors.turns import turn_seed
from laminar.engines.emulated.fake_tokens import make_logprobs, make_prompt, make_tokens
from laminar.names.ids import hash64
from tools.simulator.scenario import Scenario

TURNS_MAX = 4
CONTEXT_MAX = 20  #: tokens of one answer of the environment
SPEAKS_FIRST = 3  #: the environment speaks first for one prompt in so many
GREETING = (60_001, 60_002)  #: no engine samples these


class Made(NamedTuple):
    """Undisturbed result of one attempt."""

    counts: tuple[int, ...]  #: sampled tokens of each turn
    tokens: bytes  #: int32 tokens of all turns
    logprobs: bytes  #: float32
    contexts: tuple[tuple[int, ...], ...]  #: tokens read after each turn but the last
    cut_off: bool  #: whether the engine stopped at the limit

    @property
    def begins(self) -> tuple[int, ...]:
        """Numbers of sampled tokens before each turn."""
        return tuple(accumulate(self.counts, initial=0))[:-1]


def made_of(scenario: Scenario, seed: int) -> Made:
    """Return all of an attempt; `seed`: that of the trajectory."""
    counts, tokens, logprobs, contexts = list[int](), b"", b"", list[tuple[int, ...]]()
    turns = 1 + hash64(seed, "turns") % TURNS_MAX if scenario.settings.has_environment else 1
    for turn in range(turns):
        own, room = turn_seed(seed, turn), scenario.lengths.limit - sum(counts)
        count = min(scenario.lengths.draw_length(own), room)
        counts.append(count)
        tokens += make_tokens(own, 0, count, ends=count < room)
        logprobs += make_logprobs(own, 0, count)
        if count == room or turn == turns - 1:
            return Made(tuple(counts), tokens, logprobs, tuple(contexts), count == room)
        contexts.append(context_of(seed, turn))
    raise AssertionError("the last turn ends it")


def begin_of(scenario: Scenario, seed: int, own: int) -> int:
    """Return the sampled tokens before the turn of an attempt that has the seed `own`."""
    begins = made_of(scenario, seed).begins
    return next(begin for turn, begin in enumerate(begins) if turn_seed(seed, turn) == own)


def context_of(seed: int, turn: int) -> tuple[int, ...]:
    """Return the environment's answer to this turn."""
    length = 1 + hash64(seed, "context", turn) % CONTEXT_MAX
    return tuple(70_000 + hash64(seed, "context", turn, at) % 1_000 for at in range(length))


def prompt_with(scenario: Scenario, purpose: str, row_index: int) -> tuple[int, ...]:
    """Return the prompt of a row, and what the environment says first."""
    speaks = scenario.settings.has_environment and row_index % SPEAKS_FIRST == 0
    return (*make_prompt(purpose, row_index), *(GREETING if speaks else ()))


def read_before(scenario: Scenario, seed: int, turn: int) -> tuple[int, ...]:
    """Return the tokens that the engine reads after the prompt and before a turn."""
    made, found = made_of(scenario, seed), list[int]()
    for at, context in enumerate(made.contexts[:turn]):
        start, count = made.begins[at], made.counts[at]
        sampled = memoryview(made.tokens)[4 * start : 4 * (start + count)].cast("i")
        found += [*sampled, *context]
    return tuple(found)
