"""Engine use of the replicas over time: cache, running and waiting sequences.

Reads   a replay: the gauges of the replicas
Gives   EngineUse; `compute_summary`, its means for the summary

A gauge is a report that a replica sends at a fixed interval; means are over the gauges of the time
in which the run generates and trains.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.log.run_log import WallClock
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import Command, Stamped

COLUMNS = 5


class ReplicaGauges(NamedTuple):
    """Gauges of one replica, in order of time."""

    unix_ns: NDArray[np.int64]
    kv_used: NDArray[np.int64]  #: tokens
    kv_capacity: NDArray[np.int64]  #: tokens; 0 if not reported
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]

    @property
    def kv_use(self) -> NDArray[np.float64]:
        """Used share of the cache; NaN where the capacity was not reported."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.kv_capacity > 0, self.kv_used / self.kv_capacity, np.nan)


class EngineUse:
    """Replay observer that collects the gauges."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._clock = WallClock()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        members = state.members
        now, event, name = self._clock.unix_ns(stamped), stamped.event, stamped.peer
        if not isinstance(event, ev.TokenProgress) or state.run.phase != Phase.RUNNING:
            return
        if name not in members.replicas or members.actors[name].incarnation != stamped.incarnation:
            return  # from an earlier process of this name
        rows = self._rows.setdefault(name, array("q"))
        rows.extend(
            (now, event.kv_used_tokens, event.kv_capacity_tokens, event.running, event.waiting)
        )

    def get_gauges(self, replica: str) -> ReplicaGauges:
        rows = np.array(self._rows.get(replica, ()), dtype=np.int64).reshape(-1, COLUMNS)
        return ReplicaGauges(*rows.T)

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas that reported."""
        return sorted(self._rows)

    def compute_summary(self) -> dict[str, Any]:
        """Return means over all gauges, and the cache use per replica; None without data."""
        found = {name: self.get_gauges(name) for name in self.replicas}
        uses = {name: _mean(gauges.kv_use) for name, gauges in found.items()}
        whole = np.concatenate([np.zeros(0), *(gauges.kv_use for gauges in found.values())])
        running = [gauges.running for gauges in found.values()]
        waiting = [gauges.waiting for gauges in found.values()]
        return {
            "kv_use_mean": _mean(whole),
            "kv_use": {name: use for name, use in uses.items() if use is not None},
            "running_mean": _mean(np.concatenate([np.zeros(0), *running])),
            "waiting_mean": _mean(np.concatenate([np.zeros(0), *waiting])),
        }


def _mean(values: NDArray[Any]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
