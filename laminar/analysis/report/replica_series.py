"""Series of the replicas over time: cache, running and waiting sequences, migrations.

Reads   gauges; rows of the table `migrations`
Gives   ReplicaSeries: over the seconds since the run's first event

A gauge varies with every group that a replica takes. Therefore each part of the time has one
figure per gauge: the mean of each replica in it, then their mean, lowest and highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.report.figures import ReplicaGauges, Row

PARTS = 40  #: of the time

Points = tuple[list[float], list[float]]
Column = NDArray[Any]


class Band(NamedTuple):
    """Gauge over the replicas; empty if no engine reported it."""

    x: list[float]
    mean: list[float]
    ends: list[tuple[float, float]]  #: lowest and highest


class ReplicaSeries(NamedTuple):
    """Series of one run."""

    kv_percent: Band
    running: Band
    waiting: Band  #: empty if none ever waited
    emptied: Points  #: replicas so far
    moved: Points  #: trajectories so far


def build_series(found: Mapping[str, ReplicaGauges], migrations: Sequence[Row]) -> ReplicaSeries:
    waits = any(gauges.waiting.any() for gauges in found.values())
    placed = sorted(
        (row for row in migrations if row["placed"] is not None),
        key=lambda row: row["ordered_event"],
    )
    times = [row["placed"] for row in placed]
    moved = np.cumsum([row["moved"] for row in placed], dtype=float).tolist()
    gauges = found.values()
    return ReplicaSeries(
        kv_percent=_build_band([(g.seconds, 100 * g.kv_use) for g in gauges]),
        running=_build_band([(g.seconds, g.running) for g in gauges]),
        waiting=_build_band([(g.seconds, g.waiting) for g in gauges if waits]),
        emptied=([0.0, *times], [float(n) for n in range(len(times) + 1)]),
        moved=([0.0, *times], [0.0, *moved]),
    )


def _build_band(columns: Sequence[tuple[Column, Column]]) -> Band:
    """Build the band of (seconds, values); leave out parts of the time without a report."""
    if not columns:
        return Band([], [], [])
    everything = np.concatenate([seconds for seconds, _ in columns])
    edges = np.linspace(everything.min(), everything.max(), PARTS + 1)
    rows = []
    for seconds, values in columns:
        known = ~np.isnan(values)
        sums, _ = np.histogram(seconds[known], bins=edges, weights=values[known])
        counts, _ = np.histogram(seconds[known], bins=edges)
        rows.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
    means = np.array(rows)
    some = ~np.isnan(means).all(axis=0)
    middles, means = ((edges[:-1] + edges[1:]) / 2)[some], means[:, some]
    lowest, highest = np.nanmin(means, axis=0).tolist(), np.nanmax(means, axis=0).tolist()
    ends = list(zip(lowest, highest, strict=True))
    return Band(middles.tolist(), np.nanmean(means, axis=0).tolist(), ends)
