"""How many sequences an engine decodes together within a time, by its own steps so far.

Reads   step records
Gives   DecodeSpeed, a bounded summary of them; sequences_within

Pure. The time of a decode step is taken to be a line, a base and so much for each sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from laminar.engines.protocol import StepRecord

STEPS_KEPT = 15
"""Of each batch size, the latest: their median passes over a step that was held up, or that
prefilled what came in."""


class DecodeSpeed:
    """Of one engine."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = {}  #: durations in ns by number of sequences

    def add(self, records: Iterable[StepRecord]) -> None:
        """A step that gave a sequence several tokens is no decode step of this size."""
        for record in records:
            if record.running and record.tokens == record.running:
                of_size = self._latest.setdefault(record.running, deque(maxlen=STEPS_KEPT))
                of_size.append(record.end_ns - record.start_ns)

    def points(self) -> list[tuple[int, float]]:
        """(sequences, ns of a step) for each batch size that was seen."""
        return [(size, median(durations)) for size, durations in self._latest.items()]


def sequences_within(points: Sequence[tuple[int, float]], budget_ns: float, most: int) -> int:
    """At which number of sequences, from 1 to `most`, the line of least squares through the points
    (sequences, ns) reaches the budget; `most` while fewer than two sizes are known."""
    if len(points) < 2:
        return most
    mean_size, mean_ns = fmean(size for size, _ in points), fmean(ns for _, ns in points)
    spread = sum((size - mean_size) ** 2 for size, _ in points)
    slope = sum((size - mean_size) * (ns - mean_ns) for size, ns in points) / spread
    at_most = mean_ns + slope * (most - mean_size)
    if at_most <= budget_ns:
        return most
    if slope <= 0:  # no number of sequences is within the budget
        return 1
    return max(1, min(most, int(most - (at_most - budget_ns) / slope)))
