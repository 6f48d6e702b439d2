"""An evaluation in words, for terminal and report.

Reads   facts of core/held_out.py, as status.json and summary.json have them
Gives   held_out, a line; beside, its parts without the score; share, score; is_shaped
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_SCORE = 1e-9
"""A mean score of right or wrong is the share of right answers, up to rounding."""


def held_out(told: Mapping[str, Any]) -> str:
    """An evaluation in a line: the share of right answers, and what else there is to know."""
    answered = told["total"] - (told["missing"] or 0)
    right = f"{told['correct']}/{answered} right = {share(told)}"
    mean = [f"mean score {score(told)}"] if is_shaped(told) else []
    return ", ".join([right, *mean, *beside(told)])


def beside(told: Mapping[str, Any]) -> list[str]:
    """What helps to judge a score."""
    parts, n = [], told["answers_per_prompt"]
    if n > 1 and told["passed"] is not None:
        parts.append(f"pass@{n} {told['passed']:.3f}")
    if told["mean_length"] is not None:
        parts.append(f"{told['mean_length']:.0f} tokens")
    if told["truncated_share"]:
        parts.append(f"{told['truncated_share']:.1%} truncated")
    if told["missing"]:
        parts.append(f"{told['missing']} missing")
    return parts


def share(told: Mapping[str, Any]) -> str:
    return _with_error(told["share"], told["share_se"])


def score(told: Mapping[str, Any]) -> str:
    return _with_error(told["score"], told["score_se"])


def is_shaped(told: Mapping[str, Any]) -> bool:
    """The mean score says something else than the share of right answers."""
    known = told["score"] is not None and told["share"] is not None
    return known and abs(told["score"] - told["share"]) > SAME_SCORE


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")
