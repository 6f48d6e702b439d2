"""Evaluations: the running one, the one that is due, and the results.

Reads   nothing
Gives   Evaluations and its part Evaluation
"""

from __future__ import annotations

import msgspec

from laminar.core.state.evaluation_scores import EvaluationCounts, EvaluationResult


class Evaluation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A running evaluation on one version; position = row * samples per prompt + sample."""

    index: int
    version: int
    step: int
    final: bool
    queue: list[int]  #: positions still to dispatch, in order
    total: int
    attempts: dict[int, int] = {}  #: attempts at positions that were lost and run again
    done: int = 0
    correct: int = 0
    counts: EvaluationCounts = msgspec.field(default_factory=EvaluationCounts)


class Evaluations(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The evaluations of a run; one runs at a time."""

    running: Evaluation | None = None
    due: int = -1  #: lowest version to be evaluated, -1: none
    results: list[EvaluationResult] = []
    next_index: int = 0
