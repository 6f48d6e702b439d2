"""Utilization figures computed from intervals, as defined in docs/metrics.md.

Reads   intervals of the log, spans and engine steps of the timeline
Gives   overlap, decode_gap_ratio, nearly_empty_share, publish_stall_share, time shares; None where
        there is no basis

Each figure is a ratio of times measured in one run on one machine, so it means the same on a laptop
and on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from laminar.analysis.log.timeline import Steps, TimelineSpan, select_state

NEARLY_EMPTY = 8  #: threshold: one in this many slots
GAPS_MIN = 20  #: fewest intervals for a meaningful 95th percentile


def compute_overlap(busy: Intervals, held_back: Intervals, stepping: Intervals) -> float | None:
    """Return the share of the trainer's busy time in which a replica was stepping.

    Time in which the staleness bound blocks every replica is excluded: it results from the chosen
    bound, not from the system.
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
    """Return p95 of decode intervals during publishes or others' pulls over p95 of the rest."""
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
    """Return (start, next start) of steps between which the replica always had work to decode."""
    gaps = np.stack((steps[:-1, 0], steps[1:, 0]), axis=1)
    decoding = (steps[:-1, 2] > 0) & (steps[1:, 2] > 0)
    chosen: Intervals = gaps[decoding & mask_inside_spans(gaps, running)]
    return chosen


def nearly_empty_share(steps: Mapping[str, Steps], slots: Mapping[str, int]) -> float | None:
    """Return the share of decode steps with at most an eighth of their replica's slots in use."""
    sampling, empty = 0, 0
    for name, rows in steps.items():
        sequences = rows[rows[:, 2] > 0, 2]
        sampling += len(sequences)
        empty += int((sequences * NEARLY_EMPTY <= slots[name]).sum())
    return empty / sampling if sampling else None


def publish_stall_share(stalls: Intervals, publishes: Sequence[tuple[int, int]]) -> float | None:
    """Return the time that publishing blocked the trainer over the time from payload to publish.

    `publishes`: both times of each step."""
    whole = sum(published_ns - received_ns for received_ns, published_ns in publishes)
    return length_ns(stalls) / whole if whole else None


def compute_shares(life: Intervals, parts: Mapping[str, Intervals], rest: str) -> dict[str, float]:
    """Return shares of a lifetime; where parts overlap, the earlier one takes the time."""
    whole = length_ns(life)
    found: dict[str, float] = {}
    for name, part in parts.items():
        found[name] = length_ns(intersect_intervals(life, part)) / whole if whole else 0.0
        life = subtract_intervals(life, part)
    found[rest] = length_ns(life) / whole if whole else 0.0
    return found


def trainer_shares(
    life: Intervals,
    spans: Sequence[TimelineSpan],
    free: Intervals,
    final_evaluation: Intervals,
    working: Intervals,
) -> dict[str, float]:
    """Return the trainer's time shares; the last wait ends with the process and has no span."""
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
    """Return a replica's time shares; draining: stepping below capacity without taking new work."""
    parts = {
        "draining": intersect_intervals(stepping, spare),
        "stepping": stepping,
        "pulling": pulling,
        "staleness_bound": bound,
    }
    return compute_shares(life, parts, "no_work")
