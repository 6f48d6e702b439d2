"""Scores of evaluations: counted while one runs, summarized when it is done.

Reads   TrajectoryRewarded of evaluation samples
Writes  EvaluationCounts of the running evaluation; EvaluationResult, once it is done

No decision depends on it. It is in the state, and not in an observer, because an evaluation
continues when the coordinator is restarted. Sums are kept as the bits of float64, as scores are.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from laminar.core.state.scores import add_to_bits, bits_of, float_of, sum_in_order
from laminar.events import events as ev

REPORTED_FIELDS = (
    "step", "version", "final",
    "correct", "total", "missing",  # responses
    "share", "share_se",  # share of correct responses among the scored ones, and its standard error
    "score", "score_se",  # mean and its standard error
    "answers_per_prompt", "passed",  # share of prompts with at least one correct response
    "mean_length", "truncated_share", "extras",
)  # fmt: skip
"""The reported fields of an evaluation."""
EXTRAS_MAX = 32  #: the maximum number of further figures in one evaluation; the first ones are kept


class PromptScores(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The responses to one evaluation prompt so far."""

    answers: int = 0  #: scored responses
    correct: int = 0
    reward_bits: int = 0  #: sum of their scores


class MetricSum(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The sum of one figure over the responses that have it."""

    answers: int = 0
    bits: int = 0


class EvaluationCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The counts of a running evaluation."""

    missing: int = 0  #: responses that were never scored
    truncated: int = 0
    tokens: int = 0
    prompts: dict[int, PromptScores] = {}  #: by row
    extras: dict[str, MetricSum] = {}  #: further figures of the reward function, by name


class EvaluationStatistics(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The statistics of a finished evaluation; unscored responses are neither right nor wrong."""

    answers_per_prompt: int
    answered: int  #: scored responses
    prompts: int  #: prompts with at least one of them
    passed: int  #: prompts with a correct response
    missing: int
    truncated: int
    tokens: int  #: tokens of scored responses
    share_se_bits: int  #: standard error of the share of correct responses, over prompts
    reward_bits: int  #: mean over responses
    score_se_bits: int
    extras: dict[str, int] = {}  #: bits of the mean over the responses that have it, by name


class EvaluationResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of a finished evaluation."""

    index: int
    version: int
    step: int
    final: bool
    total: int  #: requested responses
    correct: int
    figures: EvaluationStatistics


def count_sample(held: EvaluationCounts, row: int, event: ev.TrajectoryRewarded) -> None:
    """Count one scored response."""
    score = float_of(event.reward_bits)
    prompt = held.prompts.setdefault(row, PromptScores())
    prompt.answers += 1
    prompt.correct += event.correct
    prompt.reward_bits = add_to_bits(prompt.reward_bits, score)
    held.truncated += event.truncated
    held.tokens += event.num_tokens
    for name, value in event.extras.items():
        if name in held.extras or len(held.extras) < EXTRAS_MAX:
            found = held.extras.setdefault(name, MetricSum())
            found.answers += 1
            found.bits = add_to_bits(found.bits, value)


def compute_statistics(held: EvaluationCounts, answers_per_prompt: int) -> EvaluationStatistics:
    """Compute the statistics of a finished evaluation."""
    prompts = list(held.prompts.values())
    answered = sum(prompt.answers for prompt in prompts)
    scores = [float_of(prompt.reward_bits) for prompt in prompts]
    return EvaluationStatistics(
        answers_per_prompt=answers_per_prompt,
        answered=answered,
        prompts=len(prompts),
        passed=sum(prompt.correct > 0 for prompt in prompts),
        missing=held.missing,
        truncated=held.truncated,
        tokens=held.tokens,
        share_se_bits=bits_of(_standard_error([p.correct / p.answers for p in prompts])),
        reward_bits=bits_of(sum_in_order(scores) / answered if answered else 0.0),
        score_se_bits=bits_of(
            _standard_error([s / p.answers for s, p in zip(scores, prompts, strict=True)])
        ),
        extras={n: bits_of(float_of(s.bits) / s.answers) for n, s in held.extras.items()},
    )


def describe_evaluation(result: EvaluationResult) -> dict[str, Any]:
    """Return an evaluation as shown and written to files; None where there is no basis."""
    found = result.figures
    answered = found.answered
    shown: dict[str, Any] = dict.fromkeys(REPORTED_FIELDS)
    shown |= {
        "step": result.step,
        "version": result.version,
        "final": result.final,
        "correct": result.correct,
        "total": result.total,
        "share": result.correct / answered if answered else None,
        "answers_per_prompt": found.answers_per_prompt,
        "missing": found.missing,
        "extras": {},
    }
    if answered:
        shown |= {
            "passed": found.passed / found.prompts,
            "score": _to_finite_float(found.reward_bits),
            "mean_length": found.tokens / answered,
            "truncated_share": found.truncated / answered,
            "extras": {name: _to_finite_float(bits) for name, bits in found.extras.items()},
        }
    if found.prompts > 1:
        shown["share_se"] = _to_finite_float(found.share_se_bits)
        shown["score_se"] = _to_finite_float(found.score_se_bits)
    return shown


def _to_finite_float(bits: int) -> float | None:
    """Return the float, or None: sums of huge scores may not be finite."""
    value = float_of(bits)
    return value if math.isfinite(value) else None


def _standard_error(values: list[float]) -> float:
    """Return the standard error of the mean over prompts; 0 for one prompt.

    Responses to one prompt are not independent."""
    count = len(values)
    if count < 2:
        return 0.0
    mean = sum_in_order(values) / count
    return math.sqrt(sum_in_order((v - mean) * (v - mean) for v in values) / (count - 1) / count)
