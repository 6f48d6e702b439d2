"""Which rows did not come from the weights that their version names: they are left out of a step.

Reads   the mismatch per (replica, weight version) of a batch, before the optimizer touches anything
Gives   MismatchSource: an origin whose rows are not to be trained; the scores that movement is
        measured by

A probe proves that weights have arrived. It cannot see keys and values that were kept from older
weights, or a wrong temperature: the log-probs of the sampled tokens can. With the weights that
generated a row, the trainer would score it as the engine did, up to rounding. The trainer has moved
on since; how far is measured, on a few rows of every batch scored before its updates, in float32 by
the step itself, and once more after them. By the triangle inequality honest rows differ by no more
than rounding and the sum of these movements.

An update moves the log-prob of a token by about as much as the token was in doubt, which is 1 - p.
A model that has learnt its task is sure of most tokens, and all that a step moves is in the few
others. So a movement is of so much doubt, and an origin may differ by the doubt of its tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from laminar.config import Config
from laminar.training.model.micro_batches import MicroBatch
from laminar.training.ranks import Ranks
from laminar.training.steps import Mismatch, MismatchSource, Origin, TrainSample, get_origin

ROUNDING = {"float32": 1e-3, "bfloat16": 0.15}
"""Nats per token; what was measured is in docs/training.md."""
MOVEMENT_FACTOR = 3.0
"""The rows of the measurement are few, and not those that the limit is for."""
MIN_DOUBT = 1e-4
"""Of a token, on average over the rows of a measurement: what is less is rounding."""
FEW_TOKENS = 4.0
"""The limit of n tokens is larger by the factor 1 + FEW_TOKENS / sqrt(n), where siblings count as
one: they begin alike, and in flight their first tokens may be all that a version has sampled."""
MOVEMENT_ROWS = 16
"""Trained rows of each batch that are scored again after its updates, in about one pass: a tenth of
a step of 128 rows (docs/training.md)."""


class MismatchLimits:
    """How far trainer and engine may differ, by the age of the weights that generated."""

    def __init__(self, rounding: float) -> None:
        """`rounding`: of equal weights, nats per token."""
        self._rounding = rounding
        self._moved: dict[int, float] = {}

    def record_movement(self, step: int, distance: float) -> None:
        """The updates of `step` changed the log-probs by so much; nats per doubt."""
        self._moved[step] = distance

    def get_movement(self, step: int) -> float:
        return self._moved[step]

    @property
    def movements(self) -> dict[int, float]:
        """How far every step so far has moved the weights, for a checkpoint."""
        return dict(self._moved)

    def restore_movements(self, movements: Mapping[int, float]) -> None:
        """Take the movements as they were after the last of these steps."""
        self._moved = dict(movements)

    def find_suspects(
        self,
        mismatch: Mapping[Origin, Mismatch],
        made: Mapping[int, int],
        siblings: Mapping[Origin, float],
        step: int,
    ) -> dict[Origin, MismatchSource]:
        """The origins that differ too much at `step`; `made`: version -> steps that it has seen;
        `siblings` as siblings_of gives them.

        What is not finite is the trainer's own fault: an engine's log-probs always are.
        """
        found = {}
        for origin, figure in mismatch.items():
            distance = self._sum_movements(made[origin[1]], step)
            limit = self._rounding + MOVEMENT_FACTOR * distance * figure.mean_doubt
            limit *= 1 + FEW_TOKENS / math.sqrt(figure.tokens / siblings[origin])
            if limit < figure.mean_abs_diff < math.inf:
                found[origin] = MismatchSource(figure.mean_abs_diff, limit)
        return found

    def _sum_movements(self, made: int, step: int) -> float:
        """A step of which nothing is known, as it was another process's, may have moved any way."""
        return sum(self._moved.get(s, math.inf) for s in range(made, step))


def count_siblings(samples: Iterable[TrainSample]) -> dict[Origin, float]:
    """How many rows of one prompt each origin has sampled of, on average over its prompts."""
    rows: dict[Origin, list[str]] = {}
    for sample in samples:
        for origin in {get_origin(span): None for span in sample.spans}:
            rows.setdefault(origin, []).append(sample.group_id)
    return {origin: len(groups) / len(set(groups)) for origin, groups in rows.items()}


def movement_rows(trained: Sequence[TrainSample], tokens: int) -> list[list[TrainSample]]:
    """The few: those with most doubt, and as many evenly from the others; of each what fits in half
    of so many tokens, but one at least, if there is one."""
    by_doubt = sorted(trained, key=_sum_doubts, reverse=True)
    half = MOVEMENT_ROWS // 2
    others = by_doubt[half:]
    evenly = others[:: -(-len(others) // half) or 1]
    return [
        rows for part in (by_doubt[:half], evenly) if (rows := _select_fitting(part, tokens // 2))
    ]


def _select_fitting(rows: Sequence[TrainSample], tokens: int) -> list[TrainSample]:
    ends = itertools.accumulate(row.length for row in rows)
    return [
        row for i, (row, end) in enumerate(zip(rows, ends, strict=True)) if end <= tokens or not i
    ]


def measure_movement(
    parts: Sequence[Sequence[TrainSample]], before: Tensor, after: Tensor
) -> float:
    """How far log-probs [tokens] of these rows are apart, nats per doubt that they had: of the part
    that has moved furthest. Few rows miss what others move: each part is a measurement of its own.
    """
    counts = [sum(len(s.response_ids) for s in part) for part in parts]
    found = (
        _measure_part(*halves)
        for halves in zip(before.split(counts), after.split(counts), strict=True)
    )
    return max(found, default=0.0)


def _measure_part(before: Tensor, after: Tensor) -> float:
    doubt = float(compute_doubts(before).sum())
    return float((after - before).abs().sum()) / max(doubt, MIN_DOUBT * len(before))


def compute_doubts(log_probs: Tensor) -> Tensor:
    """1 - p of tokens with these log-probs; what rounding has put above 0 is none."""
    return torch.expm1(log_probs).neg().clamp(min=0.0)


def _sum_doubts(sample: TrainSample) -> float:
    """Of all its tokens together, as its engine scored them."""
    return float(compute_doubts(torch.tensor(sample.logprobs, dtype=torch.float64)).sum())


def gather_scores(
    samples: Sequence[TrainSample], passes: Iterable[tuple[MicroBatch, Tensor]], ranks: Ranks
) -> Tensor:
    """Log-probs [tokens] float64 of all response tokens of `samples`, in order, of all ranks.

    `passes`: those of this rank with their scores [tokens]; they may have other rows, too.
    """
    ends = itertools.accumulate(len(s.response_ids) for s in samples)
    end_of = {s.sample_id: end for s, end in zip(samples, ends, strict=True)}
    found = torch.zeros(max(end_of.values(), default=0), dtype=torch.float64)
    for micro, scores in passes:
        if micro.empty:
            continue
        rows = scores.split(micro.rows.counts.tolist())
        for sample_id, row in zip(micro.sample_ids, rows, strict=True):
            if (end := end_of.get(sample_id)) is not None:
                found[end - len(row) : end] = row
    return ranks.all_reduce(found)


def get_rounding(config: Config, compute: torch.dtype) -> float:
    """The user's limit, or that of the less precise of trainer and engine."""
    given = config.algorithm.rollout_correction.mismatch_limit
    rough = compute == torch.bfloat16 or "bfloat16" in (config.weights.dtype, config.rollout.dtype)
    return given or ROUNDING["bfloat16" if rough else "float32"]
