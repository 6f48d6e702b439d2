"""Grouping of neighbouring cache rows into attention calls, so that short rows stay cheap.

Reads   the lengths of the rows in slot order; the cost of an extra call, in cached positions
Gives   spans of neighbouring rows; whether moving the rows is worth its copies

Attention over a span reads its longest row's positions for each of its rows. All rows of a decode
step grow by one token, so the gain of a cut stays the same until rows come or go: only then is
there a new plan, and each step updates only the spans' lengths. Rows of similar length form one
span. Long rows scattered among short ones cannot be cut off cheaply; the rows are sorted once the
steps have wasted as many positions as that would copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

KV_ROUND = 64  #: attention runs over a multiple of this many cache positions
MOVE_COST = 3  #: a moved position is read and written, three times as slow as a read


def round_up(length: int) -> int:
    return -(-length // KV_ROUND) * KV_ROUND


class SlotSpan(NamedTuple):
    """Neighbouring slots that share an attention call."""

    first: int
    stop: int
    kv_len: int  #: cache positions that attention runs over, a multiple of KV_ROUND


def plan_spans(lengths: Lengths, call_cost: int) -> list[int]:
    """Return the first rows of the spans, ascending; each cut saves more than `call_cost`."""
    cuts = [0]
    pending = [(0, len(lengths))]
    while pending:
        first, stop = pending.pop()
        cut = _best_cut(lengths[first:stop], call_cost)
        if cut:
            cuts.append(first + cut)
            pending += [(first, first + cut), (first + cut, stop)]
    return sorted(cuts)


def _best_cut(lengths: Lengths, call_cost: int) -> int:
    """Return the number of rows before the best cut; 0 if none saves more than `call_cost`."""
    rows, longest = len(lengths), int(lengths.max())
    if rows * longest - int(lengths.sum()) <= call_cost:
        return 0
    before = np.maximum.accumulate(lengths[:-1])
    behind = np.maximum.accumulate(lengths[:0:-1])[::-1]
    counts = np.arange(1, rows)
    costs = counts * before + (rows - counts) * behind
    best = int(costs.argmin())
    return best + 1 if rows * longest - int(costs[best]) > call_cost else 0


def estimate_step_cost(lengths: Lengths, firsts: list[int], call_cost: int) -> int:
    """Return the positions that a step reads for each layer and key head, its calls included."""
    counts = np.diff([*firsts, len(lengths)])
    return int((counts * np.maximum.reduceat(lengths, firsts)).sum()) + call_cost * len(firsts)


class SpanPlanner:
    """The plan of one engine's running rows."""

    def __init__(self, call_cost: int) -> None:
        self._call_cost = call_cost
        self._firsts: list[int] = []  # empty: rows came or went
        self._excess = 0  # positions that a step reads in excess of sorted rows
        self._lost = 0  # the excess summed over the steps since the last sort

    def discard_plan(self) -> None:
        self._firsts = []

    def compute_spans(self, lengths: Lengths) -> list[SlotSpan]:
        """Return the spans of a step over rows of these lengths."""
        if not self._firsts:
            self._plan_spans(lengths)
        self._lost += self._excess
        kv_lens = map(round_up, np.maximum.reduceat(lengths, self._firsts).tolist())
        stops = [*self._firsts[1:], len(lengths)]
        return [SlotSpan(*span) for span in zip(self._firsts, stops, kv_lens, strict=True)]

    def choose_order(self, lengths: Lengths) -> list[int] | None:
        """Return the rows, longest first, once the steps have lost the cost of moving them."""
        if self._lost == 0 or self._lost <= MOVE_COST * int(lengths.sum()):
            return None
        self._lost = 0
        self.discard_plan()
        rows: list[int] = np.argsort(-lengths, kind="stable").tolist()
        return rows

    def _plan_spans(self, lengths: Lengths) -> None:
        self._firsts, self._excess = plan_spans(lengths, self._call_cost), 0
        here = estimate_step_cost(lengths, self._firsts, self._call_cost)
        in_vain = here - self._call_cost * len(self._firsts) - int(lengths.sum())
        if in_vain > self._call_cost:  # else no order of the rows is worth another call
            ordered = np.sort(lengths)[::-1]
            there = estimate_step_cost(
                ordered, plan_spans(ordered, self._call_cost), self._call_cost
            )
            self._excess = max(here - there, 0)
