"""Reports of a replica about its engine: a gauge per interval, and its steps.

Reads   EngineStats and step records of the engine, the running trajectories
Writes  engine steps, for the timeline
Emits   TokenProgress
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from laminar.actors.active_sequence import ActiveSequence
from laminar.actors.admission_requests import AdmissionRequests
from laminar.actors.host import Host
from laminar.config import Config
from laminar.config.rollout import RolloutConfig
from laminar.engines.protocol import EngineStep, ReplicaEngine
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId

GAUGES_PER_S_MAX = 500
"""Maximum rate of gauges in a run: each is a record of the coordinator's log."""
STEPS_KEPT = 15
"""Latest steps kept per batch size; their median ignores delayed steps and prefills."""


def gauge_interval_s(config: Config) -> float:
    """Return the time between two gauges of a replica."""
    least_s = config.rollout.progress_interval_ms / 1000
    return max(least_s, config.total_replicas / GAUGES_PER_S_MAX)


def largest_batch(rollout: RolloutConfig) -> int:
    """Return the largest decode batch when work is packed, as far as the settings determine it."""
    given = rollout.max_num_seqs if rollout.max_batch == "auto" else rollout.max_batch
    return min(given, rollout.max_num_seqs)


class EngineMetrics:
    """The reports of one engine, for as long as its process lives."""

    def __init__(
        self,
        host: Host,
        engine: ReplicaEngine,
        keep_steps: Callable[[bytes], None],
        running: Mapping[str, ActiveSequence],
        openings: AdmissionRequests,
    ) -> None:
        """Report on `engine`; `keep_steps`: see ReplicaParts.record_steps."""
        self._host, self._engine, self._keep_steps = host, engine, keep_steps
        self._running, self._openings = running, openings
        self._speed = DecodeSpeed()
        self._repacked = host.config.repack.policy != "off"
        self.tokens_total = 0  #: all sampled tokens, including those of aborted trajectories

    async def report_periodically(self, interval_s: float) -> None:
        """Send one gauge per interval, however long the store takes."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            gauge = self._measure_progress()
            self._host.send_gauge(self._add_straggler_fields(gauge) if self._repacked else gauge)
            self.write_steps()

    def _measure_progress(self) -> ev.TokenProgress:
        stats = self._engine.get_stats()
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

    def _add_straggler_fields(self, gauge: ev.TokenProgress) -> ev.TokenProgress:
        """Add the inputs of the repack plan; lengths only if this may be a straggler."""
        max_batch = self._max_batch()
        tail = not gauge.waiting and gauge.running <= max_batch
        lengths = {TrajectoryId(t): running.sampled for t, running in self._running.items()}
        return msgspec.structs.replace(
            gauge, max_batch=max_batch, as_of=self._openings.as_of, lengths=lengths if tail else {}
        )

    def _max_batch(self) -> int:
        """Return the set batch size, else the one that decodes within the budget so far."""
        rollout = self._host.config.rollout
        if rollout.max_batch != "auto" or rollout.decode_budget_ms == "none":
            return largest_batch(rollout)
        budget_ns = rollout.decode_budget_ms * 1e6
        return fit_batch_size(self._speed.get_points(), budget_ns, rollout.max_num_seqs)

    def write_steps(self) -> None:
        """Write (start, end, sequences, tokens) of every engine step, as rows of four int64."""
        records = self._engine.drain_steps()
        if records:
            self._speed.add(records)
            rows = np.array(records, dtype="<i8")
            rows[:, :2] += self._host.clock_offset_ns
            self._keep_steps(rows.tobytes())


class DecodeSpeed:
    """An estimate of how many sequences an engine decodes within a time, from its steps so far.

    The time of a decode step is modelled as linear in the number of sequences.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = {}  #: durations in ns by number of sequences

    def add(self, records: Iterable[EngineStep]) -> None:
        """Add the decode steps; one that gave a sequence several tokens does not count."""
        for record in records:
            if record.running and record.tokens == record.running:
                of_size = self._latest.setdefault(record.running, deque(maxlen=STEPS_KEPT))
                of_size.append(record.end_ns - record.start_ns)

    def get_points(self) -> list[tuple[int, float]]:
        """Return (sequences, ns of a step) for each observed batch size."""
        return [(size, median(durations)) for size, durations in self._latest.items()]


def fit_batch_size(points: Sequence[tuple[int, float]], budget_ns: float, most: int) -> int:
    """Return the number of sequences, 1 to `most`, at which a step takes the budget.

    It is taken from the least-squares line through the points (sequences, ns); `most` if fewer than
    two sizes are known.
    """
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
