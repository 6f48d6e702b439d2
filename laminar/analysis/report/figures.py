"""Figures of a run: its facts with the timelines of its processes, in the form of the report.

Reads   the facts, timeline/ of a run directory
Gives   RunFigures; Conditions; ReplicaGauges, read_gauges
Raises  ConfigError for a run directory that cannot be read
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from laminar.analysis.facts.reader import Facts, load_facts
from laminar.analysis.log import timeline
from laminar.analysis.log.intervals import Intervals, merge_intervals
from laminar.core.state.statuses import Phase
from laminar.events.base import COORDINATOR
from laminar.names.ids import Purpose
from laminar.names.roles import Role

Row = dict[str, Any]


class ReplicaGauges(NamedTuple):
    """Gauges of one replica, in order of time."""

    seconds: NDArray[np.float64]
    kv_use: NDArray[np.float64]  #: used share of the cache; NaN where its size was not reported
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]


class Conditions:
    """Intervals in which conditions held, in unix ns; those that last are cut at the last event."""

    def __init__(self, facts: Facts) -> None:
        self._found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for row in facts.rows("conditions"):
            ended = facts.header.last_ns if row["ended"] is None else facts.to_unix_ns(row["ended"])
            times = (facts.to_unix_ns(row["began"]), ended)
            self._found.setdefault((row["actor"], row["condition"]), []).append(times)

    def get_intervals(self, condition: str, actor: str = "") -> Intervals:
        return merge_intervals(self._found.get((actor, condition), []))


class RunFigures:
    """Everything from which the report computes its figures."""

    def __init__(self, run_dir: Path, facts: Facts | None = None) -> None:
        self.run_dir, self.facts = run_dir, facts or load_facts(run_dir)
        self.state = self.facts.state
        self.first_ns = self.facts.header.first_ns
        self.conditions = Conditions(self.facts)
        self.processes = self.facts.rows("processes")
        self.trajectories = self.facts.rows("trajectories")
        self.steps_trained = self.facts.rows("steps")
        self.published_ns = {
            row["version"]: self.facts.to_unix_ns(row["published"])
            for row in self.facts.rows("versions")
        }
        self.trainers = {
            name: timeline.read_spans(run_dir, name) for name in self._list_ready(Role.TRAINER)
        }
        replicas = sorted(self._list_ready(Role.ROLLOUT))
        self.pulls = {name: timeline.read_spans(run_dir, name) for name in replicas}
        self.steps = {name: timeline.read_steps(run_dir, name) for name in replicas}
        self.slots = {
            row["process"]: row["slots"] for row in self.processes if row["slots"] is not None
        }
        self.cut = timeline.cut_timelines(run_dir)  #: processes whose first spans were removed
        self.gauges = read_gauges(self.facts.table("gauges"))

    @property
    def closed(self) -> list[Row]:
        """Trajectories whose end the store has confirmed."""
        return [row for row in self.trajectories if row["ended"] is not None]

    @property
    def trained(self) -> list[Row]:
        return [row for row in self.closed if row["outcome"] == "trained"]

    @property
    def generated(self) -> list[Row]:
        """Finished trajectories of training rows, whether they have ended or not."""
        found = (row for row in self.trajectories if row["finished"] is not None)
        return [row for row in found if row["purpose"] == Purpose.TRAIN]

    @property
    def training(self) -> list[Row]:
        """Closed trajectories of training rows."""
        return [row for row in self.closed if row["purpose"] == Purpose.TRAIN]

    @property
    def completed(self) -> list[Row]:
        """Steps that the trainer has reported."""
        return [row for row in self.steps_trained if row["completed"] is not None]

    @property
    def coordinators(self) -> int:
        """Coordinators that the run has had."""
        return sum(row["process"] == COORDINATOR for row in self.processes)

    @property
    def lost_by(self) -> dict[str, str]:
        """Reason for the last loss of each process."""
        lives = [row for row in self.processes if row["process"] != COORDINATOR]
        return {row["process"]: row["reason"] for row in lives if row["reason"] is not None}

    def _list_ready(self, role: Role) -> list[str]:
        """Return the processes of a role that were ever ready."""
        ready = [p for p in self.processes if p["role"] == role and p["ready"] is not None]
        ready.sort(key=lambda row: row["ready_event"])
        return list(dict.fromkeys(row["process"] for row in ready))


def read_gauges(table: pa.Table) -> dict[str, ReplicaGauges]:
    """Return the gauges of each replica while the run was running, from the table of all."""
    table = table.filter(pc.equal(table["phase"], Phase.RUNNING))
    found = {}
    for name in sorted(table["replica"].unique().to_pylist()):
        part = table.filter(pc.equal(table["replica"], name))
        used, size = part["kv_used"].to_numpy(), part["kv_capacity"].to_numpy()
        kv_use = np.full(len(part), np.nan)
        np.divide(used, size, out=kv_use, where=size > 0)
        columns = (part[column].to_numpy() for column in ("running", "waiting"))
        found[name] = ReplicaGauges(part["reported"].to_numpy(), kv_use, *columns)
    return found
