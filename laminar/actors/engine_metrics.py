"""What a replica tells of its engine while it works: a gauge per interval, and its steps.

Reads   EngineStats and step records of the engine, what runs here
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
from laminar.engines.protocol import ReplicaEngine, StepRecord
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId

GAUGES_PER_S_MAX = 500
"""The most gauges of a whole run: each is a record of the coordinator's log."""
STEPS_KEPT = 15
"""Steps of each batch size, the latest: their median passes over a step that was held up, or that
prefilled what came in."""


def gauge_interval_s(config: Config) -> float:
    """The time between two gauges of a replica."""
    least_s = config.rollout.progress_interval_ms / 1000
    return max(least_s, config.total_replicas / GAUGES_PER_S_MAX)


def largest_batch(rollout: RolloutConfig) -> int:
    """The most sequences of a decode step when work is packed, as far as the settings say."""
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
        """`keep_steps`: as ReplicaParts has it."""
        self._host, self._engine, self._keep_steps = host, engine, keep_steps
        self._running, self._openings = running, openings
        self._speed = DecodeSpeed()
        self._repacked = host.config.repack.policy != "off"
        self.tokens_total = 0  #: sampled, also those of what has been aborted since

    async def report_periodically(self, interval_s: float) -> None:
        """One gauge per interval, however long the store takes for what it is given."""
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
        """What repack is planned by; the lengths only while this may be a tail."""
        max_batch = self._max_batch()
        tail = not gauge.waiting and gauge.running <= max_batch
        lengths = {TrajectoryId(t): running.sampled for t, running in self._running.items()}
        return msgspec.structs.replace(
            gauge,
            max_batch=max_batch,
            as_of=self._openings.as_of,
            lengths=lengths if tail else {},
        )

    def _max_batch(self) -> int:
        """The batch size that is given; else as many as decode within the budget, by the steps so
        far."""
        rollout = self._host.config.rollout
        if rollout.max_batch != "auto" or rollout.decode_budget_ms == "none":
            return largest_batch(rollout)
        budget_ns = rollout.decode_budget_ms * 1e6
        return fit_batch_size(self._speed.get_points(), budget_ns, rollout.max_num_seqs)

    def write_steps(self) -> None:
        """(start, end, sequences, tokens) of every engine step, as rows of four int64."""
        records = self._engine.drain_steps()
        if records:
            self._speed.add(records)
            rows = np.array(records, dtype="<i8")
            rows[:, :2] += self._host.clock_offset_ns
            self._keep_steps(rows.tobytes())


class DecodeSpeed:
    """How many sequences an engine decodes together within a time, by its own steps so far.

    The time of a decode step is taken to be a line: a base, and so much for each sequence.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = {}  #: durations in ns by number of sequences

    def add(self, records: Iterable[StepRecord]) -> None:
        """A step that gave a sequence several tokens is no decode step of this size."""
        for record in records:
            if record.running and record.tokens == record.running:
                of_size = self._latest.setdefault(record.running, deque(maxlen=STEPS_KEPT))
                of_size.append(record.end_ns - record.start_ns)

    def get_points(self) -> list[tuple[int, float]]:
        """(sequences, ns of a step) for each batch size that was seen."""
        return [(size, median(durations)) for size, durations in self._latest.items()]


def fit_batch_size(points: Sequence[tuple[int, float]], budget_ns: float, most: int) -> int:
    """The number of sequences, from 1 to `most`, at which the line of least squares through the
    points (sequences, ns) reaches the budget; `most` while fewer than two sizes are known."""
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
