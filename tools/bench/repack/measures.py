"""Setup and measures of a run of the repack benchmark.

Reads   batches of the engines, reports of a world
Gives   Setup; Meter, which returns Seen; all_tokens_are_there
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.engines.emulated.timing import EngineTiming

SECOND = 1_000_000_000  #: nanoseconds
GROUP_SIZE = 16
SAMPLE_S = 5.0


class Lengths(Protocol):
    """A distribution of response lengths."""

    def draw_length(self, seed: int) -> int: ...


class Setup(NamedTuple):
    """Parameters of one run."""

    replicas: int
    staleness: int
    policy: str  #: repack policy of the core: gain, best-fit; empty for off
    max_batch: int  #: the paper's B
    timing: EngineTiming
    lengths: Lengths
    seed: int
    warm_steps: int  #: steps before the measurement
    steps: int  #: measured steps
    slots: int = 1_024  #: trajectories of a replica at once, and per version
    groups_per_step: int = 512
    start_s: float = 600.0  #: period over which the starts of replicas are spread
    train_s: float = 236.0  #: mean training time of a step
    queued: int = 0  #: trajectories that wait at a replica whose slots are all taken
    publish_s: float = 1.2  #: of 32B: the trainer's copy and the chain
    load_s: float = 0.6  #: of 32B: a pull

    @property
    def capacity(self) -> int:
        """Trajectories that a replica takes at once."""
        return self.slots + self.queued

    def trains_for_s(self, step: int) -> float:
        """Return the training time of a step, the same for every policy so that runs are paired."""
        return self.train_s * random.Random(f"train/{self.seed}/{step}").uniform(0.9, 1.1)


class Seen(NamedTuple):
    """Measures between the ends of two steps."""

    seconds: float
    trained: int  #: tokens
    generated: int  #: tokens
    cache_use: float
    latency_mean_s: float
    latency_max_s: float
    released: int  #: replicas
    moved: int  #: trajectories
    prefilled: int  #: tokens
    preempted: int
    idle: float  #: share of replica time without anything running
    trainer_idle: float  #: share of the time
    staleness_group_mean: float  #: steps between a group's oldest weights and its batch
    staleness_group_max: int
    staleness_token_mean: float  #: steps between a token's weights and its batch

    @property
    def trained_per_s(self) -> float:
        return self.trained / self.seconds

    @property
    def generated_per_s(self) -> float:
        return self.generated / self.seconds


def all_tokens_are_there(sampled: int, trained: int, live: int) -> None:
    """Check that every sampled token is trained or live; raise RuntimeError if not."""
    if sampled != trained + live:
        raise RuntimeError(f"{sampled} tokens sampled, {trained} trained, {live} live")


class Meter:
    """A measurement from the end of the warm steps to the end of the last step.

    Every run is checked: no trained group is older than the bound, and sampled tokens = trained +
    live.
    """

    def __init__(self, setup: Setup) -> None:
        self.on = False
        self._bound, self._trained, self._oldest = setup.staleness, 0, 0
        self._began = self._trainer_free = 0
        self._at_start: tuple[int, ...] = ()
        self._sums: dict[str, float] = {}
        self._latencies: list[float] = []

    def begin(self, now: int, batches: Sequence[TimedBatch]) -> None:
        self.on, self._began, self._at_start = True, now, _counts(now, batches)

    def add(self, name: str, value: float) -> None:
        if self.on:
            self._sums[name] = self._sums.get(name, 0.0) + value

    def latency(self, duration: int) -> None:
        if self.on:
            self._latencies.append(duration / SECOND)

    def train_begins(self, now: int) -> None:
        self.add("trainer_idle", (now - self._trainer_free) / SECOND)

    def chosen(self, groups: Sequence[int], tokens: int, ages: float) -> None:
        """Record the staleness of each group of a batch, and the sum over all its tokens."""
        oldest = max(groups)
        if oldest > self._bound:
            raise RuntimeError(f"a group of staleness {oldest} is trained, bound {self._bound}")
        for name, value in (
            ("groups", len(groups)), ("group_ages", sum(groups)), ("tokens", tokens), ("ages", ages)
        ):  # fmt: skip
            self.add(name, value)
        self._oldest = max(self._oldest, oldest) if self.on else 0

    def trained(self, now: int, tokens: int) -> None:
        self.add("trained", tokens)
        self._trained += tokens
        self._trainer_free = now

    def sample(self, now: int, batches: Sequence[TimedBatch]) -> None:
        if self.on:
            _counts(now, batches)
            capacity = sum(batch.capacity for batch in batches)
            self.add("samples", 1)
            self.add("cache", sum(batch.cached for batch in batches) / capacity)
            self.add("idle", sum(not batch.running for batch in batches) / len(batches))

    def seen(self, now: int, batches: Sequence[TimedBatch], live: int) -> Seen:
        """Return the measures; `live` is the number of tokens that are not trained yet."""
        counts = _counts(now, batches)
        all_tokens_are_there(counts[0], self._trained, live)
        sampled, prefilled, preempted = (
            there - before for there, before in zip(counts, self._at_start, strict=True)
        )
        seconds, samples = (now - self._began) / SECOND, self._sums["samples"]
        return Seen(
            seconds=seconds,
            trained=int(self._sums["trained"]),
            generated=sampled,
            cache_use=self._sums["cache"] / samples,
            latency_mean_s=sum(self._latencies) / len(self._latencies),
            latency_max_s=max(self._latencies),
            released=int(self._sums.get("released", 0)),
            moved=int(self._sums.get("moved", 0)),
            prefilled=prefilled,
            preempted=preempted,
            idle=self._sums["idle"] / samples,
            trainer_idle=self._sums["trainer_idle"] / seconds,
            staleness_group_mean=self._sums["group_ages"] / self._sums["groups"],
            staleness_group_max=self._oldest,
            staleness_token_mean=self._sums["ages"] / self._sums["tokens"],
        )


def _counts(now: int, batches: Sequence[TimedBatch]) -> tuple[int, ...]:
    """Return the tokens sampled and prefilled and the preemptions so far."""
    for batch in batches:
        batch.advance_to(float(now))
    return tuple(
        sum(values)
        for values in zip(*((b.sampled, b.prefilled, b.preempted) for b in batches), strict=True)
    )
