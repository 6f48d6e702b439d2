"""Sets of time as sorted, disjoint intervals, and operations on them.

Reads   nothing
Gives   union, intersection, difference, length; all over int64 arrays [n, 2] of (start, end) in ns,
        start inclusive, end exclusive

Shares of time are differences of such sets, so that no moment is counted twice or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]
Mask = NDArray[np.bool_]

EMPTY: Intervals = np.zeros((0, 2), dtype=np.int64)


def merge_intervals(pairs: Iterable[tuple[int, int]] | Intervals, gap_ns: int = 0) -> Intervals:
    """Return the time covered by any (start, end); gaps of at most `gap_ns` are filled."""
    rows = pairs if isinstance(pairs, np.ndarray) else np.array(list(pairs), dtype=np.int64)
    rows = rows.reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return EMPTY
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reached = np.maximum.accumulate(rows[:, 1])
    begins = np.concatenate(([True], rows[1:, 0] > reached[:-1] + gap_ns))
    ends = np.concatenate((begins[1:], [True]))
    return np.stack((rows[begins, 0], reached[ends]), axis=1)


def intersect_intervals(a: Intervals, b: Intervals) -> Intervals:
    return _combine_intervals(a, b, lambda in_a, in_b: in_a & in_b)


def subtract_intervals(a: Intervals, b: Intervals) -> Intervals:
    """Return the time of `a` that is not in `b`."""
    return _combine_intervals(a, b, lambda in_a, in_b: in_a & ~in_b)


def length_ns(a: Intervals) -> int:
    return int((a[:, 1] - a[:, 0]).sum())


def mask_covered_points(points: NDArray[np.int64], a: Intervals) -> Mask:
    """Return a mask of the points that lie in `a`."""
    begun = np.searchsorted(a[:, 0], points, side="right")
    ended = np.searchsorted(a[:, 1], points, side="right")
    return begun > ended


def mask_inside_spans(spans: Intervals, a: Intervals) -> Mask:
    """Return a mask of the spans that lie entirely within one interval of `a`."""
    index = np.searchsorted(a[:, 0], spans[:, 0], side="right") - 1
    if not len(a):
        return np.zeros(len(spans), dtype=np.bool_)
    whole: Mask = (index >= 0) & (spans[:, 1] <= a[np.maximum(index, 0), 1])
    return whole


def mask_touching_spans(spans: Intervals, a: Intervals) -> Mask:
    """Return a mask of the spans that overlap `a`."""
    begun_by_end = np.searchsorted(a[:, 0], spans[:, 1], side="left")
    ended_by_start = np.searchsorted(a[:, 1], spans[:, 0], side="right")
    shared: Mask = begun_by_end > ended_by_start
    return shared


def _combine_intervals(a: Intervals, b: Intervals, keep: Callable[[Mask, Mask], Mask]) -> Intervals:
    """Cut time at every bound and keep the pieces selected by `keep`."""
    bounds = np.unique(np.concatenate((a.ravel(), b.ravel())))
    kept = keep(mask_covered_points(bounds, a), mask_covered_points(bounds, b))[:-1]
    return merge_intervals(np.stack((bounds[:-1], bounds[1:]), axis=1)[kept])
