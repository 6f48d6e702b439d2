"""Series of the replicas over time: cache, running and waiting sequences, migrations.

Reads   gauges; rows of the table `migrations`
Gives   ReplicaSeries: over the seconds since the run's first event

A gauge varies with every group that a replica takes. Therefore each part of the time has one
figure per gauge: the mean of each replica in it, then their mean, lowest and highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.report.figures import ReplicaGauges, Row

PARTS = 40  #: of the time

Points = tuple[list[float], list[float]]
Column = NDArray[np.float64]


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


def build_series(
    found: Mapping[str, ReplicaGauges], migrations: Sequence[Row], first_ns: int
) -> ReplicaSeries:
    waits = any(gauges.waiting.any() for gauges in found.values())
    placed = sorted(
        (row for row in migrations if row["placed"] is not None),
        key=lambda row: row["ordered_event"],
    )
    times = [row["placed"] for row in placed]
    moved = np.cumsum([row["moved"] for row in placed], dtype=float).tolist()
    cache = {name: 100 * gauges.kv_use for name, gauges in found.items()}
    running = {name: gauges.running.astype(float) for name, gauges in found.items()}
    waiting = {name: gauges.waiting.astype(float) for name, gauges in found.items() if waits}
    return ReplicaSeries(
        kv_percent=_build_band(found, cache, first_ns),
        running=_build_band(found, running, first_ns),
        waiting=_build_band(found, waiting, first_ns),
        emptied=([0.0, *times], [float(n) for n in range(len(times) + 1)]),
        moved=([0.0, *times], [0.0, *moved]),
    )


def _build_band(
    found: Mapping[str, ReplicaGauges], values: Mapping[str, Column], first_ns: int
) -> Band:
    """Build the band of one gauge; leave out parts of the time in which no replica reported."""
    seconds = {name: (found[name].unix_ns - first_ns) / 1e9 for name in values}
    if not seconds:
        return Band([], [], [])
    everything = np.concatenate(list(seconds.values()))
    edges = np.linspace(everything.min(), everything.max(), PARTS + 1)
    rows = []
    for name, column in values.items():
        known = ~np.isnan(column)
        sums, _ = np.histogram(seconds[name][known], bins=edges, weights=column[known])
        counts, _ = np.histogram(seconds[name][known], bins=edges)
        rows.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
    means = np.array(rows)
    some = ~np.isnan(means).all(axis=0)
    middles, means = ((edges[:-1] + edges[1:]) / 2)[some], means[:, some]
    lowest, highest = np.nanmin(means, axis=0).tolist(), np.nanmax(means, axis=0).tolist()
    ends = list(zip(lowest, highest, strict=True))
    return Band(middles.tolist(), np.nanmean(means, axis=0).tolist(), ends)
