"""Detection of rows that did not come from the weights that their version names.

Reads   the mismatch per (replica, weight version) of a batch, before the optimizer touches anything
Gives   MismatchSource: an origin whose rows are not to be trained; the scores that measure movement

A probe proves that weights have arrived. It cannot detect keys and values kept from older weights,
or a wrong temperature; the log-probs of the sampled tokens can. With the weights that generated a
row, the trainer would score it as the engine did, up to rounding. The trainer has since moved; the
distance is measured on a few rows of every batch, scored in float32 by the step itself before its
updates and once more after them. By the triangle inequality correct rows differ by no more than
rounding plus the sum of these movements.

An update moves the log-prob of a token by about as much as the token was in doubt, which is 1 - p.
A trained model is sure of most tokens, and a step moves only the few others. So a movement is
measured per doubt, and an origin may differ in proportion to the doubt of its tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from laminar.config import Config
from laminar.training.steps import Mismatch, MismatchSource, Origin, TrainSample, get_origin

ROUNDING = {"float32": 1e-3, "bfloat16": 0.15}
"""Nats per token; measured values are in docs/training.md."""
MOVEMENT_FACTOR = 3.0
"""Safety factor: the rows of the measurement are few, and other than those under the limit."""
MIN_DOUBT = 1e-4
"""Least doubt of a token, on average over the rows of a measurement: below it is rounding."""
FEW_TOKENS = 4.0
"""The limit of n tokens grows by the factor 1 + FEW_TOKENS / sqrt(n), where siblings count as one:
they begin alike, and in flight a version may have sampled only their first tokens."""
MOVEMENT_ROWS = 16
"""Trained rows of each batch that are scored again after its updates, in about one pass: a tenth of
a step of 128 rows (docs/training.md)."""


class MismatchLimits:
    """Limits on the difference of trainer and engine, by the age of the sampling weights."""

    def __init__(self, rounding: float) -> None:
        """Set the limits up; `rounding`: difference of equal weights, nats per token."""
        self._rounding = rounding
        #: how far the updates of each step moved the log-probs, nats per doubt
        self.moved: dict[int, float] = {}

    def find_suspects(
        self,
        mismatch: Mapping[Origin, Mismatch],
        made: Mapping[int, int],
        siblings: Mapping[Origin, float],
        step: int,
    ) -> dict[Origin, MismatchSource]:
        """Return the origins that differ too much at `step`.

        `made`: version -> steps behind it; `siblings` as from count_siblings. A difference that is
        not finite is the trainer's fault: an engine's log-probs are always finite.
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
        """Sum the movements since `made`; the unknown step of another process is infinite."""
        return sum(self.moved.get(s, math.inf) for s in range(made, step))


def count_siblings(samples: Iterable[TrainSample]) -> dict[Origin, float]:
    """Return for each origin the rows per prompt that it sampled, averaged over its prompts."""
    rows: dict[Origin, list[str]] = {}
    for sample in samples:
        for origin in {get_origin(span): None for span in sample.spans}:
            rows.setdefault(origin, []).append(sample.group_id)
    return {origin: len(groups) / len(set(groups)) for origin, groups in rows.items()}


def find_oldest_steps(samples: Iterable[TrainSample]) -> dict[int, int]:
    """Return by version the steps behind the oldest weights that its tokens depend on.

    A response that continued in flight may use a cache of those weights."""
    made: dict[int, int] = {}
    for sample in samples:
        for version in {span.weight_version for span in sample.spans}:
            made[version] = min(made.get(version, sample.version_step), sample.version_step)
    return made


def movement_rows(samples: Sequence[TrainSample], tokens: int) -> list[list[TrainSample]]:
    """Pick the samples that measure movement: those of most doubt, and evenly from the others.

    Each of the two picks fits in half of `tokens`, but has at least one sample if there is one."""
    by_doubt = sorted(samples, key=_sum_doubts, reverse=True)
    half = MOVEMENT_ROWS // 2
    others = by_doubt[half:]
    evenly = others[:: -(-len(others) // half) or 1]
    picks = (_select_fitting(pick, tokens // 2) for pick in (by_doubt[:half], evenly))
    return [pick for pick in picks if pick]


def _select_fitting(samples: Sequence[TrainSample], tokens: int) -> list[TrainSample]:
    ends = itertools.accumulate(s.length for s in samples)
    return [
        s for i, (s, end) in enumerate(zip(samples, ends, strict=True)) if end <= tokens or not i
    ]


def measure_movement(
    picks: Sequence[Sequence[TrainSample]], before: Tensor, after: Tensor
) -> float:
    """Return the distance of two scores [tokens] of these samples, nats per doubt before the step.

    Few samples miss what others move, so each pick is measured separately and the largest counts.
    """
    counts = [sum(len(s.response_ids) for s in pick) for pick in picks]
    scores = zip(before.split(counts), after.split(counts), strict=True)
    return max((_measure_pick(*pair) for pair in scores), default=0.0)


def _measure_pick(before: Tensor, after: Tensor) -> float:
    doubt = float(compute_doubts(before).sum())
    return float((after - before).abs().sum()) / max(doubt, MIN_DOUBT * len(before))


def compute_doubts(log_probs: Tensor) -> Tensor:
    """Return 1 - p of tokens with these log-probs; values that rounding put above 0 give 0."""
    return torch.expm1(log_probs).neg().clamp(min=0.0)


def _sum_doubts(sample: TrainSample) -> float:
    """Sum the doubt of a sample's tokens, as its engine scored them."""
    return float(compute_doubts(torch.tensor(sample.logprobs, dtype=torch.float64)).sum())


def get_rounding(config: Config, compute: torch.dtype) -> float:
    """Return the user's limit, or that of the less precise of trainer and engine."""
    given = config.algorithm.rollout_correction.mismatch_limit
    rough = compute == torch.bfloat16 or "bfloat16" in (config.weights.dtype, config.rollout.dtype)
    return given or ROUNDING["bfloat16" if rough else "float32"]
