"""Facts of a run that never was: replicas that sample, load and wait, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from laminar.analysis.facts.writer import SCHEMAS


class MadeFacts:
    """Tables with the columns of the real ones; a column without values is NULL."""

    def __init__(self, **rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def table(self, name: str) -> pa.Table:
        return pa.Table.from_pylist(list(self._rows.get(name, ())), SCHEMAS[name])


def make_facts(replicas: int = 4, stays: int = 40, slots: int = 8, steps: int = 5) -> MadeFacts:
    """Every replica runs `slots` trajectories at a time, and loads a version after each step."""
    seconds = stays / slots * 10.0
    names = [f"rollout-{i}" for i in range(replicas)]
    roles = [("trainer-0", "trainer"), ("relay-0", "relay"), ("store-0", "store")]
    roles += [(name, "rollout") for name in names]
    every = seconds / steps
    return MadeFacts(
        events=[
            {"event": i + 1, "time": i * seconds / 100, "type": "token-progress"}
            for i in range(101)
        ],
        processes=[
            {"process": name, "role": role, "pid": 1, "joined": 0.0} for name, role in roles
        ],
        versions=[{"version": i, "step": i, "published": i * every} for i in range(steps)],
        holdings=[{"relay": "relay-0", "version": i, "began": i * every} for i in range(steps)],
        steps=[
            {"step": i + 1, "version": i + 1, "ordered": i * every, "completed": (i + 0.5) * every}
            for i in range(steps)
        ],
        replica_states=[
            {
                "replica": name,
                "state": state,
                "began": (i + at) * every,
                "ended": (i + until) * every,
                "version": i,
            }
            for name in names
            for i in range(steps)
            for state, at, until in (("pulling", 0.0, 0.1), ("busy", 0.1, 1.0))
        ],
        placements=[
            {
                "trajectory": f"0.{r}.{i}",
                "placement": 1,
                "replica": name,
                "version": int(i / stays * steps),
                "dispatched": i // slots * 10.0 + i % slots,
                "left_at": i // slots * 10.0 + 10 + i % slots,
            }
            for r, name in enumerate(names)
            for i in range(stays)
        ],
        migrations=[
            {
                "source": names[0],
                "destination": names[-1],
                "ordered": seconds / 2,
                "freed": seconds / 2 + 1,
            }
        ],
    )
