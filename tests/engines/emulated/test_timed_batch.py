"""A batch in time (engines/emulated/timed_batch.py) beside one that makes step after step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from laminar.engines.emulated.timed_batch import SPARE_SHARE, TimedBatch
from laminar.engines.emulated.timing import EngineTiming

TIMING = EngineTiming(
    step_us=8_000, sequence_us=60, prefill_tokens_per_s=20_000, token_us=0.5, cache_tokens=400
)


@dataclass
class Stepper:
    """The same rules, one step at a time."""

    timing: EngineTiming
    slots: int
    time: float = 0.0
    step_ends: float = -1.0  #: -1: none has begun
    lengths: dict[str, list[int]] = field(default_factory=dict)  #: prompt, tokens, total
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    finished: list[tuple[str, float]] = field(default_factory=list)
    preempted: int = 0
    prefilled: int = 0

    @property
    def cached(self) -> int:
        return sum(sum(self.lengths[name][:2]) for name in self.running)

    def add(self, name: str, prompt: int, done: int, total: int, now: float) -> None:
        if self.step_ends >= 0 or now > self.time:
            self.advance(now)
        self.lengths[name] = [prompt, done, total]
        self.waiting.append(name)

    def remove(self, name: str, now: float) -> None:
        self.advance(now)
        if name in self.running:
            self.running.remove(name)
            if not self.running:
                self.time, self.step_ends = now, -1.0
        else:
            self.waiting.remove(name)
        del self.lengths[name]

    def prefill_again(self, now: float) -> None:
        self.advance(now)
        self.waiting, self.running = [*self.running, *self.waiting], []
        self.time, self.step_ends = now, -1.0

    def advance(self, now: float) -> None:
        while True:
            if self.step_ends < 0 and not self.begin():
                self.time = max(self.time, now)
                return
            if self.step_ends > now:
                return
            self.time, self.step_ends = self.step_ends, -1.0
            for name in list(self.running):
                self.lengths[name][1] += 1
                if self.lengths[name][1] == self.lengths[name][2]:
                    self.running.remove(name)
                    del self.lengths[name]
                    self.finished.append((name, self.time))

    def begin(self) -> bool:
        capacity, prefill, preempted = self.timing.cache_tokens, 0, False
        while len(self.running) > 1 and self.cached + len(self.running) > capacity:
            self.waiting.insert(0, self.running.pop())
            self.preempted += 1
            preempted = True
        while not preempted and self.waiting and len(self.running) < self.slots:
            need = sum(self.lengths[self.waiting[0]][:2])
            wanted = self.cached + need + len(self.running) + 1
            if self.running and wanted > capacity - int(SPARE_SHARE * capacity):
                break
            self.running.append(self.waiting.pop(0))
            prefill += need
        self.prefilled += prefill
        step_ns = self.timing.step_ns(len(self.running), self.cached)
        self.step_ends = self.time + step_ns + self.timing.prefill_ns(prefill)
        if not self.running:
            self.step_ends = -1.0
        return bool(self.running)


def sampled(stepper: Stepper, name: str) -> int:
    return stepper.lengths[name][1]


@pytest.mark.parametrize("seed", range(40))
def test_jumps_lead_where_steps_lead(seed: int) -> None:
    """Whatever comes and goes at whatever time: the same tokens, ends, cache and preemptions."""
    chance = random.Random(seed)
    timing = TIMING if seed % 4 else EngineTiming(cache_tokens=300)  # a step's length may not grow
    slots = chance.choice((2, 8, 40))
    batch, stepper = TimedBatch(timing, slots), Stepper(timing, slots)
    now, names, ended = 0.0, 0, []
    for _ in range(150):
        now += chance.choice((0.0, 1.0, 7e6, 9.5e6, 1e8, 6e8))
        name = chance.choice([*stepper.lengths, "new", "new"])
        if name == "new" or chance.random() < 0.5:
            names += 1
            total = chance.randint(1, 120)
            done = chance.choice((0, 0, total // 2))
            prompt = chance.randint(0, 20)
            batch.add(str(names), prompt, done, total, now)
            stepper.add(str(names), prompt, done, total, now)
        elif chance.random() < 0.1:
            batch.prefill_again(now)
            stepper.prefill_again(now)
        elif stepper.advance(now) is None and name in stepper.lengths:
            batch.remove(name, now)
            stepper.remove(name, now)
        else:
            batch.advance_to(now)
        ended += batch.finished
        batch.finished.clear()
        assert ended == [name for name, _ in stepper.finished]
        assert batch.running == len(stepper.running)
        assert batch.waiting == len(stepper.waiting)
        assert batch.cached == stepper.cached
        for name in stepper.lengths:
            assert batch.count_tokens(name) == sampled(stepper, name)
    assert (batch.preempted, batch.prefilled) == (stepper.preempted, stepper.prefilled)


def test_ends_are_told_to_the_step() -> None:
    """Somebody who wakes when the batch says so finds each end at the very time of its step."""
    batch, stepper = TimedBatch(TIMING, 64), Stepper(TIMING, 64)
    chance = random.Random(1)
    for number in range(30):
        total = chance.randint(1, 150)
        batch.add(str(number), 5, 0, total, 0.0)
        stepper.add(str(number), 5, 0, total, 0.0)
    stepper.advance(1e12)
    batch.advance_to(0.0)
    found = []
    while (now := batch.next_ns) < 1e12:
        batch.advance_to(now)
        found += [(name, now) for name in batch.finished]
        batch.finished.clear()
    assert [name for name, _ in found] == [name for name, _ in stepper.finished]
    assert [t for _, t in found] == pytest.approx([t for _, t in stepper.finished], rel=1e-9)
    assert batch.preempted == stepper.preempted > 0


def test_a_response_longer_than_the_cache_runs_alone() -> None:
    batch = TimedBatch(EngineTiming(cache_tokens=50), 8)
    batch.add("long", 0, 0, 200, 0.0)
    batch.add("short", 0, 0, 10, 0.0)
    while batch.next_ns < 1e12 or not batch.finished:
        batch.advance_to(batch.next_ns if batch.next_ns < 1e12 else 0.0)
    assert batch.finished == ["short", "long"] and batch.cached == 0
