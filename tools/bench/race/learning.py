"""Learning along a schedule: the product's prompts, engine, rewards and learner, without time.

Reads   the quickstart's configuration and model; batches of a schedule
Gives   Course, which trains batches and scores the policy on the held-out prompts; measure_cell

The tokens of a response are spread evenly over its time: at a load in flight, the older weights
have sampled that share of the response as they would complete it. The newer weights sample the rest
after a prefill (`rollout.kv_on_update = "recompute"`). Every token has the log-prob of the weights
that sampled it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, islice, zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from laminar.config import load_config
from laminar.core.scheduling.dispatch import permute_rows
from laminar.engines.build import _torch_engine
from laminar.engines.protocol import GenerateRequest, is_cut_off
from laminar.storage.rules import TokenSpan
from laminar.tasks.data.chat import encode_prompt
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.prompts import PromptRow, load_prompts
from laminar.tasks.data.tokenizer import end_ids, get_tokenizer_size, load_tokenizer
from laminar.tasks.rewards.results import RewardCall, is_correct
from laminar.tasks.rewards.reward_functions import open_scorer, reward_spec
from laminar.training.learner import Learner
from laminar.training.model.policy import load_policy
from laminar.training.steps import TrainSample
from tools.bench.race.schedule import GROUPS, SIBLINGS, Batch, Cell, RaceWorld, Response
from tools.kit.one_process import named_weights

CONFIG = Path("configs/recipes/words/run.toml")
STEPS_MAX = 60
SCORES = (0.8, 0.9)


class Draft:
    """A response while it is sampled."""

    def __init__(self, row: PromptRow, prompt: tuple[int, ...], seed: int) -> None:
        self.row, self.prompt, self.seed, self.truncated = row, prompt, seed, False
        self.tokens: list[tuple[int, float, int]] = []  #: id, log-prob, step of its weights

    def cut(self, share: float) -> None:
        """Drop the tokens after a share of the response, but none of older weights."""
        older = sum(step != self.tokens[-1][2] for _, _, step in self.tokens)
        del self.tokens[max(int(share * len(self.tokens)), older) :]


class Course:
    """A policy that trains batch after batch; a repeated batch is not trained again."""

    def __init__(self, seed: int, rate: float, corrected: bool) -> None:
        weighting = f"rollout_is={'token' if corrected else 'none'}"
        changes = [f"seed={seed}", f"optim.lr={rate}", f"algorithm.rollout_correction.{weighting}"]
        changes.append(f"rollout.max_num_seqs={GROUPS * SIBLINGS}")
        self.config = config = load_config([CONFIG], changes)
        self._tokenizer = load_tokenizer(config.model.name)
        size = get_tokenizer_size(self._tokenizer)
        self._stop = end_ids(config.model.name, self._tokenizer)
        self._decode = make_response_decoder(self._tokenizer, self._stop)
        self._prompts = load_prompts(config.data)
        self._order = permute_rows(seed, 0, len(self._prompts.train))
        self._score = open_scorer(reward_spec(config))
        self._engine = _torch_engine(config, size)
        self._policy = load_policy(config.model.name, "cpu", tokenizer_size=size)
        self._learner = Learner(config, self._policy)
        self._weights: list[dict[str, torch.Tensor]] = []  #: by step
        self._trained: list[list[Response]] = []
        self.scores: list[float] = []  #: on the held-out prompts, by completed steps
        self.token_staleness: list[float] = []  #: mean over the tokens of each batch
        self.left_out = 0  #: samples that the learner takes for those of other weights
        self._finish_step()

    def train(self, batch: Batch, step: int) -> float:
        """Train a batch as step `step` and return the score; RuntimeError if another was."""
        if step == len(self._trained):
            result = self._learner.train_step(self._sample_batch(batch.responses), step)
            self.left_out += len(result.left_out)
            self._trained.append(batch.responses)
            self.token_staleness.append(result.metrics["staleness/token_mean"])
            self._finish_step()
        elif self._trained[step] != batch.responses:
            raise RuntimeError(f"step {step} has trained another batch")
        return self.scores[step + 1]

    def _finish_step(self) -> None:
        """Keep the weights, and score them."""
        weights = named_weights(self._policy.model)
        self._weights.append({name: tensor.detach().clone() for name, tensor in weights})
        drafts = [self._make_draft(row, 0) for row in self._prompts.held_out]
        self._generate(len(self._weights) - 1, drafts, 0.0)
        correct = [is_correct(self._compute_reward(d), truncated=d.truncated) for d in drafts]
        self.scores.append(sum(correct) / len(correct))

    def _make_draft(self, row: PromptRow, seed: int) -> Draft:
        return Draft(row, tuple(encode_prompt(self._tokenizer, row, self.config.data)), seed)

    def _sample_batch(self, responses: Sequence[Response]) -> list[TrainSample]:
        """Sample with each of the weights, oldest first."""
        drafts, parts = [], dict[int, list[tuple[Draft, float]]]()
        for command, weights in responses:
            row = self._prompts.train[self._order[command.row_index % len(self._order)]]
            drafts.append(self._make_draft(row, command.seed))
            for (step, begin), (_, end) in zip_longest(weights, weights[1:], fillvalue=(0, 1.0)):
                if end > begin:
                    parts.setdefault(step, []).append((drafts[-1], end))
        for step in sorted(parts):
            self._generate(step, [d for d, _ in parts[step]], self.config.rollout.temperature)
            for draft, end in parts[step]:
                if end < 1:
                    draft.cut(end)
        return list(map(self._make_sample, responses, drafts))

    def _generate(self, step: int, drafts: Sequence[Draft], temperature: float) -> None:
        """Complete the responses with the weights of a step."""
        self._engine.load_weights(self._weights[step].items())
        limit = self.config.data.max_response_length
        for number, draft in enumerate(drafts):
            done = tuple(token for token, _, _ in draft.tokens)
            asked = (str(number), draft.prompt, done, limit, temperature, draft.seed, self._stop)
            self._engine.add(GenerateRequest(*asked))
        while deltas := self._engine.step():
            for delta in deltas:
                draft = drafts[int(delta.request_id)]
                found = zip(delta.token_ids, delta.logprobs, strict=True)
                draft.tokens += [(token, logprob, step) for token, logprob in found]
                draft.truncated = is_cut_off(delta.finish_reason)

    def _compute_reward(self, draft: Draft) -> float:
        ids = [token for token, _, _ in draft.tokens]
        (result,) = self._score(RewardCall(draft.row, [(self._decode(ids), ids)]))
        return result.reward or 0.0

    def _make_sample(self, response: Response, draft: Draft) -> TrainSample:
        command, _ = response
        ids, logprobs, steps = zip(*draft.tokens, strict=True)
        spans = ((step, len(list(tokens))) for step, tokens in groupby(steps))
        return TrainSample(
            sample_id=command.trajectory_id, group_id=command.group,
            prompt_ids=np.array(draft.prompt, np.int32), response_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32), reward=self._compute_reward(draft),
            temperature=self.config.rollout.temperature, truncated=draft.truncated,
            spans=tuple(TokenSpan("rollout-0", step, step, count) for step, count in spans),
        )  # fmt: skip


_synchronous_course = lru_cache(maxsize=2)(Course)  #: shared, because they train the same batches


def measure_cell(cell: Cell, steps_max: int = STEPS_MAX) -> dict[str, Any]:
    """Make the run of a cell, until the last of SCORES, and return its line."""
    begun, line, batches = time.process_time(), dict[str, Any](cell._asdict()), []
    course = (Course if cell.bound else _synchronous_course)(cell.seed, cell.rate, cell.corrected)
    line |= {f"{what}_{score}": None for score in SCORES for what in ("time", "steps")}
    for step, batch in enumerate(islice(RaceWorld(cell).batches(), steps_max)):
        batches.append(batch)
        reached = course.train(batch, step)
        for score in SCORES:
            if reached >= score and line[f"steps_{score}"] is None:
                line |= {f"time_{score}": round(batch.end, 2), f"steps_{score}": step + 1}
        if line[f"steps_{SCORES[-1]}"]:
            break
    count, last = len(batches), batches[-1]
    return line | {
        "trainer_idle": round(1 - sum(b.end - b.begin for b in batches) / last.end, 3),
        "slots_used": round(last.slots_used, 3),
        "staleness": round(mean(b.staleness for b in batches), 3),
        "token_staleness": round(mean(course.token_staleness[:count]), 3),
        "left_out": course.left_out,
        "scores": [round(score, 4) for score in course.scores[: count + 1]],
        "cpu_s": round(time.process_time() - begun, 1),
    }
