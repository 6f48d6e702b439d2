"""Trial of an agent: its conversations about a few rows, with a model or a stand-in.

Reads   the user's file; turns from a Sampler
Gives   try_agents, AgentTrial; sample_text, the stand-in; ModelSampler
Raises  ConfigError if the agent cannot be started at all

The sessions are those of a run, without its store and replicas. Before a run the model is not
loaded, so the stand-in writes the same sentence in each turn: that shows whether the agent starts,
asks, reads a reply and returns a score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from laminar.config import Config, ConfigError
from laminar.engines.protocol import LENGTH, STOP
from laminar.names.ids import Purpose
from laminar.storage.branches import find_path, list_paths
from laminar.storage.messages import TurnOptions
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.tokenizer import end_ids
from laminar.tasks.environments.agents import Agents, describe_replaced
from laminar.tasks.environments.stop_strings import StopStrings
from laminar.tasks.environments.turns import (
    Effect,
    NextTurn,
    Session,
    SessionLost,
    TrajectoryDone,
    TurnCall,
    count_context_room,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 0  #: of all rows
STAND_IN = "I do not know."
STAND_IN_S = 30.0  #: the longest trial of a row whose turns cost no time
Ids = tuple[int, ...]
Sampler = Callable[[Ids, int], tuple[list[int], list[float]]]
"""A function from the ids that a turn reads, and its limit, to its ids and their log-probs."""


class TrialTurn(NamedTuple):
    parent: int  #: turn that the context follows, or ROOT
    context: Ids
    sampled: Ids
    logprobs: tuple[float, ...]


class AgentTrial(NamedTuple):
    """The conversations about a row, and how they ended."""

    row: PromptRow
    turns: list[TrialTurn]
    outcome: str
    is_failed: bool = False  #: there was no request

    @property
    def branches(self) -> list[list[int]]:
        """The turns of each branch."""
        return list_paths(tuple(turn.parent for turn in self.turns), len(self.turns))


async def try_agents(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    sample: Sampler,
    limit_s: float | None = None,
    on_output: Callable[[bytes], object] = len,
) -> tuple[list[AgentTrial], list[str]]:
    """Return a trial per row, all at once, and what the user should know; raise ConfigError.

    `limit_s`: the time for each row after its first request.
    """
    ends = end_ids(config.model.name, tokenizer)
    decode = make_response_decoder(tokenizer, ends)
    agents = Agents(config, tokenizer, ends, decode, on_output)
    trial = _Trial(config, agents, ends, decode, sample, asyncio.Lock())
    try:
        await agents.start()
        found = await asyncio.gather(*(trial.try_row(row, limit_s) for row in rows))
    except SessionLost as failed:
        raise ConfigError(f"{failed}; correct {config.agents.label}") from None
    finally:
        await agents.close()
    return found, [describe_replaced(agents.replaced)] if agents.replaced else []


class _Trial(NamedTuple):
    """The sessions, and the limits of a turn."""

    config: Config
    agents: Agents
    ends: frozenset[int]
    decode: Callable[[list[int]], str]
    sample: Sampler
    model: asyncio.Lock  #: lock for one turn

    async def try_row(self, row: PromptRow, limit_s: float | None) -> AgentTrial:
        session = Session(f"trial-{row.index}", 1, SEED, row, Purpose.TRAIN)
        turns = list[TrialTurn]()
        try:
            first = await self.agents.reset(session)
            assert first is not None
            self.agents.check_template(session.trajectory_id)
            async with asyncio.timeout(limit_s):
                outcome = _describe_end(await self._converse(session, first, turns))
        except TimeoutError:
            outcome = f"it was still running after {limit_s:g} s"
        except SessionLost as failed:
            outcome = str(failed)
        return AgentTrial(row, turns, outcome, is_failed=not turns)

    async def _converse(
        self, session: Session, following: NextTurn, turns: list[TrialTurn]
    ) -> TrajectoryDone:
        """Answer requests until the agent ends, and append the turns."""
        while True:
            parent = len(turns) - 1 if following.parent is None else following.parent
            turns.append(TrialTurn(parent, following.context, (), ()))
            reason = await self._sample_turn(turns, following.options)
            parts = chain.from_iterable(
                ((False, one.context), (True, one.sampled)) for one in turns
            )
            logprobs = [*chain.from_iterable(turn.logprobs for turn in turns)]
            parents = tuple(turn.parent for turn in turns)
            lengths = [len(one.context) for one in turns], [len(one.sampled) for one in turns]
            call = TurnCall(
                session,
                len(turns) - 1,
                turns[0].context,
                tuple(parts)[1:],
                reason,
                count_context_room(self.config, *lengths, parents),
                parents=parents,
                logprobs=np.array(logprobs, "<f4").tobytes(),
            )
            answer = await self.agents.answer_turn(call, _intend)
            if isinstance(answer, TrajectoryDone):
                return answer
            following = answer

    async def _sample_turn(self, turns: list[TrialTurn], options: TurnOptions) -> str:
        """Sample the last turn; return why it ended."""
        sampled = sum(len(turn.sampled) for turn in turns)
        limit = self.config.data.max_response_length - sampled
        limit = min(limit, options.max_tokens or limit)
        path = find_path(tuple(turn.parent for turn in turns), len(turns) - 1)
        read = tuple(chain.from_iterable((*turns[i].context, *turns[i].sampled) for i in path))
        async with self.model:
            ids, logprobs = await asyncio.to_thread(self.sample, read, limit)
        end = StopStrings(options.stop, self.decode, ()).find_end(ids)
        ids, logprobs = ids[:end], logprobs[:end]
        turns[-1] = turns[-1]._replace(sampled=tuple(ids), logprobs=tuple(logprobs))
        return STOP if end is not None or ids[-1] in self.ends else LENGTH


async def _intend(effects: tuple[Effect, ...]) -> None:
    """Record nothing: a trial is not repeated."""


def _describe_end(done: TrajectoryDone) -> str:
    result, end = done.result, "the reward functions score its last turn"
    if result is not None:
        reason = f"{result.reason}: {result.detail}, " if result.reason != "ok" else ""
        end = f"{reason}score {result.reward:g}"
    return f"{end}; ended by {done.reason}" if done.reason else end


def sample_text(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> Sampler:
    """Return the stand-in for a model, which writes STAND_IN in each turn."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends)
    ids = [*tokenizer(STAND_IN, add_special_tokens=False)["input_ids"], end]

    def sample(read: Ids, limit: int) -> tuple[list[int], list[float]]:
        return [int(i) for i in ids[:limit]], [0.0] * len(ids[:limit])

    return sample


class ModelSampler:
    """The run's model, from its files, in this process."""

    def __init__(self, config: Config, ends: frozenset[int]) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(config.model.name).eval()
        filters = {"do_sample": True, "top_k": 0, "top_p": 1.0}
        self._sampling: dict[str, Any] = {**filters, "temperature": config.rollout.temperature}
        self._sampling |= {"eos_token_id": sorted(ends), "pad_token_id": min(ends)}
        self._sampling |= {"return_dict_in_generate": True, "output_scores": True}

    def __call__(self, read: Ids, limit: int) -> tuple[list[int], list[float]]:
        """Sample a turn as the run would."""
        import torch

        ids = torch.tensor([read])
        with torch.inference_mode():
            found = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **self._sampling
            )
        sampled = found.sequences[0, len(read) :].tolist()
        scores = torch.stack(found.scores, 1)[0].log_softmax(-1)
        return sampled, scores[range(len(sampled)), sampled].tolist()
