"""Spans of cache rows: what a step reads is what its rows hold, for a bounded number of calls."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from laminar.engines.spans import KV_ROUND, Lengths, SpanPlanner, estimate_step_cost, plan_spans

CALL = 500


def array(*lengths: int) -> Lengths:
    return np.array(lengths, np.int64)


def best_cost(lengths: Lengths, call_cost: int) -> int:
    """Of all ways to cut these rows."""
    inner = range(1, len(lengths))
    cuts = (c for count in range(len(lengths)) for c in itertools.combinations(inner, count))
    return min(estimate_step_cost(lengths, [0, *cut], call_cost) for cut in cuts)


def test_rows_of_about_one_length_are_one_call() -> None:
    assert plan_spans(array(300, 310, 290, 305), CALL) == [0]
    assert plan_spans(array(7), CALL) == [0]


@pytest.mark.parametrize("place", [0, 3, 15, 31])
def test_a_long_row_is_cut_off_wherever_it_stands(place: int) -> None:
    lengths = array(*[400] * 32)
    lengths[place] = 4_000
    expected = sorted({0, place, place + 1} - {32})
    assert plan_spans(lengths, CALL) == expected


def test_a_cut_is_made_only_where_it_saves_more_than_its_call() -> None:
    assert plan_spans(array(1_000, 500), CALL) == [0]
    assert plan_spans(array(1_001, 500), CALL) == [0, 1]


def test_plans_of_ordered_rows_are_close_to_the_best() -> None:
    rng = random.Random(3)
    for _ in range(40):
        drawn = sorted((round(rng.lognormvariate(5, 1.2)) + 1 for _ in range(10)), reverse=True)
        lengths = array(*drawn)
        assert estimate_step_cost(lengths, plan_spans(lengths, CALL), CALL) <= 1.15 * best_cost(
            lengths, CALL
        )


def test_what_a_long_tail_reads_is_near_what_it_holds() -> None:
    rng = random.Random(4)
    drawn = [round(rng.lognormvariate(6, 1.0)) + 1 for _ in range(64)]
    lengths = np.sort(array(*drawn))[::-1]
    assert 64 * int(lengths[0]) > 5 * int(lengths.sum())
    assert estimate_step_cost(lengths, plan_spans(lengths, CALL), CALL) < 1.35 * int(lengths.sum())


def test_spans_follow_their_rows_and_are_planned_when_rows_change() -> None:
    spans = SpanPlanner(call_cost=0)
    lengths = array(130, 20, 30)
    assert spans.compute_spans(lengths) == [(0, 1, 192), (1, 2, 64), (2, 3, 64)]
    assert spans.compute_spans(lengths + KV_ROUND) == [(0, 1, 256), (1, 2, 128), (2, 3, 128)]
    spans.discard_plan()
    assert spans.compute_spans(array(20, 20)) == [(0, 2, 64)]


def test_scattered_long_rows_are_ordered_once_the_steps_have_lost_what_it_costs() -> None:
    spans = SpanPlanner(call_cost=CALL)
    lengths = array(*[4_000, 100] * 8)
    held = int(lengths.sum())
    steps = 0
    while (order := spans.choose_order(lengths)) is None:
        spans.compute_spans(lengths)
        steps += 1
    assert 1 < steps < 10
    lost = steps * (16 * 4_000 - held)
    assert lost > 3 * held
    assert order == [*range(0, 16, 2), *range(1, 16, 2)]
    spans.compute_spans(lengths[order])
    assert spans.choose_order(lengths[order]) is None


def test_rows_in_order_are_never_moved() -> None:
    spans = SpanPlanner(call_cost=CALL)
    lengths = array(5_000, 900, 800, 100, 90, 80)
    for _ in range(10_000):
        spans.compute_spans(lengths)
    assert spans.choose_order(lengths) is None
