"""Text form of an evaluation, for terminal and report.

Reads   facts of core/state/evaluation_scores.py, as stored in status.json and summary.json
Gives   format_evaluation, a line; format_details, its parts without the score; format_accuracy,
        format_score; is_shaped
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_SCORE = 1e-9
"""Tolerance for rounding: with rewards of 0 or 1 the mean score equals the accuracy."""


def format_evaluation(facts: Mapping[str, Any]) -> str:
    """Return an evaluation as one line: its accuracy, and further details."""
    answered = facts["total"] - (facts["missing"] or 0)
    right = f"{facts['correct']}/{answered} correct = {format_accuracy(facts)}"
    mean = [f"mean score {format_score(facts)}"] if is_shaped(facts) else []
    return ", ".join([right, *mean, *format_details(facts)])


def format_details(facts: Mapping[str, Any]) -> list[str]:
    """Return the details that help to judge a score."""
    parts, n = [], facts["answers_per_prompt"]
    if n > 1 and facts["passed"] is not None:
        parts.append(f"pass@{n} {facts['passed']:.3f}")
    if facts["mean_length"] is not None:
        parts.append(f"{facts['mean_length']:.0f} tokens")
    if facts["truncated_share"]:
        parts.append(f"{facts['truncated_share']:.1%} truncated")
    if facts["missing"]:
        parts.append(f"{facts['missing']} missing")
    return parts


def format_accuracy(facts: Mapping[str, Any]) -> str:
    return _with_error(facts["share"], facts["share_se"])


def format_score(facts: Mapping[str, Any]) -> str:
    return _with_error(facts["score"], facts["score_se"])


def is_shaped(facts: Mapping[str, Any]) -> bool:
    """Return whether the mean score differs from the accuracy."""
    known = facts["score"] is not None and facts["share"] is not None
    return known and abs(facts["score"] - facts["share"]) > SAME_SCORE


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")
