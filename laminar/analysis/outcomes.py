"""What became of the answers: signal of the trained groups, and every end by length.

Reads   the account of a run
Gives   group_figures; by_length: figures of four classes of lengths

A system that prefers short answers shows by length first: in what it trains, in what it drops, in
what it leaves over at the end, and in how old the weights of the long ones are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from laminar.analysis.ledger_book import TRUNCATED, Account, Closed
from laminar.core.scores import float_of
from laminar.names.ids import Purpose

CONSTANT_SPREAD = 1e-6  #: scores that differ by no more are equal, as in training
CLASSES = 4


def group_figures(account: Account) -> dict[str, Any]:
    """Shares of the trained groups; what all siblings agree on teaches nothing."""
    groups: dict[str, list[tuple[float, bool]]] = {}
    for name, closed in account.closed.items():
        if closed.ending.end == "trained":
            event = account.rewarded[name]
            scored = (float_of(event.score_bits), event.correct)
            groups.setdefault(closed.ending.group, []).append(scored)
    count = len(groups)
    right = sum(all(correct for _, correct in group) for group in groups.values())
    wrong = sum(not any(correct for _, correct in group) for group in groups.values())
    flat = sum(_spread(group) <= CONSTANT_SPREAD for group in groups.values())
    return {
        "groups_trained": count,
        "groups_mixed_versions": len(account.mixed & groups.keys()),
        "groups_all_right": right / count if count else None,
        "groups_all_wrong": wrong / count if count else None,
        "groups_no_variance": flat / count if count else None,
    }


def _spread(group: list[tuple[float, bool]]) -> float:
    scores = [score for score, _ in group]
    return max(scores) - min(scores)


def by_length(account: Account) -> list[dict[str, Any]]:
    """Training answers that have ended, in classes of about equal size by their tokens.

    One that was dropped before it was finished is in the class of what it had by then.
    """
    closed = [c for name, c in account.closed.items() if account.issued[name] == Purpose.TRAIN]
    lengths = np.array([c.num_tokens for c in closed], dtype=np.int64)
    if not len(lengths):
        return []
    edges = np.percentile(lengths, np.linspace(0, 100, CLASSES + 1)[1:-1], method="lower")
    classes = np.searchsorted(np.unique(edges), lengths, side="left")
    return [
        _class(account, [c for c, found in zip(closed, classes, strict=True) if found == number])
        for number in np.unique(classes)
    ]


def _class(account: Account, closed: list[Closed]) -> dict[str, Any]:
    trained = [c for c in closed if c.ending.end == "trained"]
    dropped = [c for c in closed if c.ending.end == "dropped"]
    reasons = Counter(c.ending.reason for c in dropped)
    ages = [account.staleness(c) for c in trained]
    finished = [account.finished.get(c.ending.trajectory_id) for c in closed]
    return {
        "tokens_min": min(c.num_tokens for c in closed),
        "tokens_max": max(c.num_tokens for c in closed),
        "trained": len(trained),
        "staleness_mean": sum(ages) / len(ages) if ages else None,
        "truncated": sum(f is not None and f.finish_reason == TRUNCATED for f in finished),
        "dropped": dict(sorted(reasons.items())),
        "unfinished": sum(found is None for found in finished),
    }
