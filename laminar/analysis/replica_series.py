"""What a page shows of the replicas over time: cache, running and waiting sequences, moves.

Reads   EngineUse, RepackBook
Gives   Series: lines by name, over the seconds since the run's first event

Few replicas have a line each; of many there are the lowest, the mean and the highest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.engine_use import EngineUse, Gauges
from laminar.analysis.repack_book import RepackBook

LINES_MAX = 8  #: replicas that have a line each
BINS = 200  #: of the time, where there are more of them

Points = tuple[list[float], list[float]]
Lines = dict[str, Points]
Column = NDArray[np.float64]


class Series(NamedTuple):
    """Of one run; empty where no engine said anything."""

    kv_percent: Lines
    running: Lines
    waiting: Lines  #: empty where none ever waited
    emptied: Points  #: replicas so far
    moved: Points  #: trajectories so far


def series(use: EngineUse, repack: RepackBook, first_ns: int) -> Series:
    found = {name.removeprefix("rollout-"): use.of(name) for name in use.replicas}
    columns = {
        "kv": {name: 100 * gauges.kv_use for name, gauges in found.items()},
        "running": {name: gauges.running.astype(float) for name, gauges in found.items()},
        "waiting": {name: gauges.waiting.astype(float) for name, gauges in found.items()},
    }
    kv, running, waiting = (_lines(found, columns[what], first_ns) for what in columns)
    waits = any(gauges.waiting.any() for gauges in found.values())
    placed = [h for h in repack.hand_overs if h.placed is not None]
    times = [(h.placed.unix_ns - first_ns) / 1e9 for h in placed if h.placed is not None]
    return Series(
        kv_percent={name: points for name, points in kv.items() if points[0]},
        running=running,
        waiting=waiting if waits else {},
        emptied=([0.0, *times], [float(n) for n in range(len(times) + 1)]),
        moved=([0.0, *times], [0.0, *np.cumsum([h.moves for h in placed], dtype=float).tolist()]),
    )


def _lines(found: dict[str, Gauges], values: dict[str, Column], first_ns: int) -> Lines:
    seconds = {name: (gauges.unix_ns - first_ns) / 1e9 for name, gauges in found.items()}
    if len(found) > LINES_MAX:
        return _summed_up(seconds, values)
    known = {name: ~np.isnan(column) for name, column in values.items()}
    return {
        name: (seconds[name][known[name]].tolist(), column[known[name]].tolist())
        for name, column in values.items()
    }


def _summed_up(seconds: dict[str, Column], values: dict[str, Column]) -> Lines:
    """Means of each replica in equal parts of the time; over the replicas their range."""
    everything = np.concatenate(list(seconds.values()))
    edges = np.linspace(everything.min(), everything.max(), BINS + 1)
    rows = []
    for name, column in values.items():
        known = ~np.isnan(column)
        sums, _ = np.histogram(seconds[name][known], bins=edges, weights=column[known])
        counts, _ = np.histogram(seconds[name][known], bins=edges)
        rows.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
    means = np.array(rows)
    some = ~np.isnan(means).all(axis=0)
    middles = ((edges[:-1] + edges[1:]) / 2)[some].tolist()
    of: dict[str, Callable[..., Column]] = {
        "lowest": np.nanmin,
        "mean": np.nanmean,
        "highest": np.nanmax,
    }
    return {name: (middles, taken(means[:, some], axis=0).tolist()) for name, taken in of.items()}
