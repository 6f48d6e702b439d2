"""Interval sets against sets of moments."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laminar.analysis.log import intervals

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def moments(rows: intervals.Intervals | list[tuple[int, int]]) -> set[int]:
    return {t for a, b in rows for t in range(int(a), int(b))}


def is_canonical(rows: intervals.Intervals) -> bool:
    """Sorted, not empty, and not touching one another."""
    flat = rows.ravel()
    return bool((np.diff(flat) > 0).all())


@given(pairs, pairs)
def test_sets_of_time(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    a, b = intervals.merge_intervals(one), intervals.merge_intervals(two)
    assert is_canonical(a)
    assert moments(a) == moments(one)
    assert intervals.length_ns(a) == len(moments(one))
    for result, expected in (
        (intervals.intersect_intervals(a, b), moments(one) & moments(two)),
        (intervals.subtract_intervals(a, b), moments(one) - moments(two)),
        (intervals.merge_intervals(np.concatenate([a, b])), moments(one) | moments(two)),
    ):
        assert is_canonical(result)
        assert moments(result) == expected


@given(pairs, pairs)
def test_relations_of_spans_to_a_set(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    spans = np.array([p for p in one if p[0] < p[1]], dtype=np.int64).reshape(-1, 2)
    a = intervals.merge_intervals(two)
    for span, within, touches in zip(
        spans,
        intervals.mask_inside_spans(spans, a),
        intervals.mask_touching_spans(spans, a),
        strict=True,
    ):
        assert within == (moments([span]) <= moments(a))
        assert touches == bool(moments([span]) & moments(a))
    points = np.arange(32)
    assert [int(p) for p in points[intervals.mask_covered_points(points, a)]] == sorted(moments(a))


def test_small_gaps_are_joined() -> None:
    rows = intervals.merge_intervals([(0, 10), (15, 20), (26, 30)], gap_ns=5)
    assert rows.tolist() == [[0, 20], [26, 30]]
