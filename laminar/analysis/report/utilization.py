"""How well a run used its processes: figures from intervals, by the definitions in docs/metrics.md.

Reads   windows of the log, spans and engine steps of the timeline
Gives   overlap, decode_gap_ratio, nearly_empty_share, publish_stall_share, time shares; None where
        there is no basis

Each figure is a ratio of times measured in one run on one machine, so it means the same on a laptop
and on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from laminar.analysis.log.intervals import (
    EMPTY,
    Intervals,
    intersect_intervals,
    length_ns,
    mask_inside_spans,
    mask_touching_spans,
    merge_intervals,
    subtract_intervals,
)
from laminar.analysis.log.timeline import Span, Steps, select_state

NEARLY_EMPTY = 8  #: one in so many slots
GAPS_MIN = 20
"""Fewer intervals than this have no 95th percentile worth the name."""


class PublishTiming(NamedTuple):
    """One step's way from its payload to its published weights."""

    received_ns: int
    published_ns: int


def compute_overlap(busy: Intervals, held_back: Intervals, stepping: Intervals) -> float | None:
    """Share of the trainer's busy time in which a replica was stepping.

    Time in which the staleness bound lets no replica do anything is not counted: there the bound
    was chosen, not the system.
    """
    counted = subtract_intervals(busy, held_back)
    whole = length_ns(counted)
    return length_ns(intersect_intervals(counted, stepping)) / whole if whole else None


def decode_gap_ratio(
    steps: Mapping[str, Steps],
    running: Mapping[str, Intervals],
    publishing: Intervals,
    pulling: Mapping[str, Intervals],
) -> float | None:
    """p95 of decode intervals beside a publish or another replica's pull, by p95 of the others."""
    beside, others = [], []
    for name, rows in steps.items():
        gaps = _decode_gaps(rows, running[name])
        pulls = [spans for other, spans in pulling.items() if other != name]
        disturbed = mask_touching_spans(gaps, merge_intervals(np.concatenate([publishing, *pulls])))
        beside.append(gaps[disturbed])
        others.append(gaps[~disturbed])
    sides = [np.concatenate([EMPTY, *side]) for side in (beside, others)]
    if min(len(side) for side in sides) < GAPS_MIN:
        return None
    p95 = [float(np.percentile(side[:, 1] - side[:, 0], 95)) for side in sides]
    return p95[0] / p95[1]


def _decode_gaps(steps: Steps, running: Intervals) -> Intervals:
    """(start, next start) of steps between which the replica always had something to decode."""
    gaps = np.stack((steps[:-1, 0], steps[1:, 0]), axis=1)
    decoding = (steps[:-1, 2] > 0) & (steps[1:, 2] > 0)
    chosen: Intervals = gaps[decoding & mask_inside_spans(gaps, running)]
    return chosen


def nearly_empty_share(steps: Mapping[str, Steps], slots: Mapping[str, int]) -> float | None:
    """The share of decode steps with at most an eighth of their replica's slots in use."""
    sampling, empty = 0, 0
    for name, rows in steps.items():
        sequences = rows[rows[:, 2] > 0, 2]
        sampling += len(sequences)
        empty += int((sequences * NEARLY_EMPTY <= slots[name]).sum())
    return empty / sampling if sampling else None


def publish_stall_share(stalls: Intervals, publishes: Sequence[PublishTiming]) -> float | None:
    """Time that publishing blocked the trainer, by time from payloads to published weights."""
    whole = sum(p.published_ns - p.received_ns for p in publishes)
    return length_ns(stalls) / whole if whole else None


def compute_shares(life: Intervals, parts: Mapping[str, Intervals], rest: str) -> dict[str, float]:
    """Shares of a life, in the order of the parts: an earlier one takes what two of them claim."""
    whole = length_ns(life)
    found: dict[str, float] = {}
    for name, part in parts.items():
        found[name] = length_ns(intersect_intervals(life, part)) / whole if whole else 0.0
        life = subtract_intervals(life, part)
    found[rest] = length_ns(life) / whole if whole else 0.0
    return found


def trainer_shares(
    life: Intervals,
    spans: Sequence[Span],
    free: Intervals,
    final_evaluation: Intervals,
    working: Intervals,
) -> dict[str, float]:
    """What the trainer did; the last wait ends with its process, so no span covers it."""
    states = ("busy", "fetching", "publishing", "probe", "saving", "exporting")
    parts = {state: select_state(spans, state) for state in states}
    last_ns = max((span.end_ns for span in spans), default=0)
    tail = intersect_intervals(free, merge_intervals([(last_ns, np.iinfo(np.int64).max)]))
    waiting = merge_intervals(np.concatenate([select_state(spans, "waiting"), tail]))
    parts["waiting_for_batch"] = intersect_intervals(waiting, working)
    parts["waiting_for_evaluation"] = intersect_intervals(waiting, final_evaluation)
    return compute_shares(life, parts, "other")


def replica_shares(
    life: Intervals, stepping: Intervals, spare: Intervals, pulling: Intervals, bound: Intervals
) -> dict[str, float]:
    """What a replica did; draining is stepping below its capacity while it takes nothing new."""
    parts = {
        "draining": intersect_intervals(stepping, spare),
        "stepping": stepping,
        "pulling": pulling,
        "staleness_bound": bound,
    }
    return compute_shares(life, parts, "no_work")
