"""What a replica tells of its engine while it works: a gauge per interval, and its steps.

Reads   EngineStats and step records of the engine
Writes  engine steps, for the timeline
Emits   TokenProgress
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from laminar.actors.host import Host
from laminar.engines.protocol import ReplicaEngine
from laminar.events import events as ev


class EngineReports:
    """Of one engine, for as long as its process lives."""

    def __init__(
        self, host: Host, engine: ReplicaEngine, keep_steps: Callable[[bytes], None]
    ) -> None:
        """`keep_steps`: as ReplicaParts has it."""
        self._host, self._engine, self._keep_steps = host, engine, keep_steps
        self.tokens_total = 0  #: sampled, also those of what has been aborted since

    async def report(self, interval_s: float) -> None:
        """One gauge per interval, however long the store takes for what it is given."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self._host.gauge(self._progress())
            self.write_steps()

    def _progress(self) -> ev.TokenProgress:
        stats = self._engine.stats()
        return ev.TokenProgress(
            tokens_total=self.tokens_total,
            kv_used_tokens=stats.kv_used_tokens,
            running=stats.running,
            waiting=stats.waiting,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            preempted=stats.preempted,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
        )

    def write_steps(self) -> None:
        """(start, end, sequences, tokens) of every engine step, as rows of four int64."""
        records = self._engine.drain_steps()
        if records:
            rows = np.array(records, dtype="<i8")
            rows[:, :2] += self._host.clock_offset_ns
            self._keep_steps(rows.tobytes())
