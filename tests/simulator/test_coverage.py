"""Must-hit marks: they are made from the product's tables, and ordinary swarms hit most of them."""

from __future__ import annotations

import pytest

from laminar.core.machine import HANDLING
from laminar.core.state.transitions import TRAJECTORY_TRANSITIONS
from tools.kit.sim_worlds import config
from tools.simulator.coverage import EXPECTED, Coverage
from tools.simulator.run import run_seeds


def test_every_row_of_the_tables_has_a_mark() -> None:
    assert {f"event:{event.__name__}" for event in HANDLING} <= set(EXPECTED)
    moves = {f"move:{before}-{trigger}" for before, trigger in TRAJECTORY_TRANSITIONS}
    assert moves <= set(EXPECTED)
    assert len(set(EXPECTED)) == len(EXPECTED)


@pytest.mark.long
def test_a_few_runs_hit_more_than_half_and_keep_every_promise() -> None:
    """Safety after every event, an end after the faults, a replay that is equal. (Row 1 of the
    scorecard has a thousand runs.)"""
    marks = Coverage()
    for outcome in run_seeds(config(), range(1, 13), 1):
        assert not outcome.invariant, (outcome.seed, outcome.details)
        marks.merge(outcome.coverage)
    assert len(marks.missing()) < len(EXPECTED) / 2, marks.missing()
