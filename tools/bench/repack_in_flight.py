"""The ceiling: replicas that take new weights in the middle of trajectories and keep their cache.

Reads   Setup
Gives   InFlight: the same measures as RepackWorld's

Modelled only, and without the core: nothing drains, so there is nothing to repack. A replica with
room takes the next group at once, as long as the groups begun so far are at most G x (steps
trained + staleness + 1); the trainer takes the oldest that have ended. What a trajectory of several
versions costs in quality, and the pause of a load, are not in it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from heapq import heapify, heappop, heappush, heapreplace

from laminar.engines.timed_batch import TimedBatch
from laminar.names import ids
from tools.bench.repack_measures import (
    GROUP_SIZE,
    SAMPLE_S,
    SECOND,
    Meter,
    Seen,
    Setup,
)

SAMPLE, TRAINED = -1, -2  #: what happens; a number from 0: the batch of a replica changes


class Group:
    """Siblings of one prompt."""

    def __init__(self, issued: int, tokens: int) -> None:
        self.issued, self.tokens, self.unfinished = issued, tokens, GROUP_SIZE


class InFlight:
    """A run from its start until enough steps are measured."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.now, self.meter = setup, 0, Meter()
        self.batches = [TimedBatch(setup.timing, setup.slots) for _ in range(setup.replicas)]
        self._chance = random.Random(f"repack/{setup.seed}")
        self._begins = [self._chance.uniform(0, setup.start_s) * SECOND for _ in self.batches]
        self._groups: dict[int, Group] = {}
        self._begun = self._completed = 0
        self._ready: list[int] = []
        self._training = 0  #: tokens of the batch; 0: the trainer waits
        self._plans = [0] * setup.replicas
        self._heap: list[tuple[int, int, int]] = []

    def run(self) -> Seen:
        last = self.setup.warm_steps + self.setup.steps
        for number, begins in enumerate(self._begins):
            self._at(begins, number)
        self._at(SAMPLE_S * SECOND, SAMPLE)
        while self._completed < last:
            self.now, what, plan = heappop(self._heap)
            if what == SAMPLE:
                self.meter.sample(self.now, self.batches)
                self._at(self.now + SAMPLE_S * SECOND, SAMPLE)
            elif what == TRAINED:
                self._trained()
            elif plan == self._plans[what]:
                self._change(what)
            self._train()
        return self.meter.seen(self.now, self.batches)

    def _at(self, when: float, what: int, plan: int = 0) -> None:
        heappush(self._heap, (math.ceil(when), what, plan))

    # --- replicas -------------------------------------------------------------------------------

    def _change(self, number: int) -> None:
        batch = self.batches[number]
        batch.advance(float(self.now))
        ended = deque(batch.finished)
        batch.finished.clear()
        for name in ended:
            order = int(name.partition(".")[0])
            group = self._groups[order]
            self.meter.latency(self.now - group.issued)
            group.unfinished -= 1
            if not group.unfinished:
                heappush(self._ready, order)
        self._fill([number])
        self._plan(number)

    def _fill(self, numbers: list[int]) -> None:
        """New groups, one at a time, to the emptiest of these replicas with room."""
        limit = self.setup.groups_per_step * (self._completed + self.setup.staleness + 1)
        loads = [(self._load(number), number) for number in numbers]
        heapify(loads)
        while loads and loads[0][0] <= self.setup.slots and self._begun < limit:
            load, number = loads[0]
            self._begin(self.batches[number])
            heapreplace(loads, (load + GROUP_SIZE, number))

    def _load(self, number: int) -> int:
        return self.batches[number].running + self.batches[number].waiting

    def _begin(self, batch: TimedBatch) -> None:
        order, tokens = self._begun, 0
        for sibling in range(GROUP_SIZE):
            group_id = ids.train_group(0, order)
            seed = ids.trajectory_seed(self.setup.seed, group_id, sibling, 1)
            total = self.setup.lengths.of(seed)
            batch.add(f"{order}.{sibling}", 0, 0, total, float(self.now))
            tokens += total
        self._groups[order] = Group(self.now, tokens)
        self._begun += 1

    def _plan(self, number: int) -> None:
        batch = self.batches[number]
        batch.advance(float(self.now))
        self._plans[number] += 1
        when = self.now if batch.finished else batch.next_ns
        if when < math.inf:
            self._at(when, number, self._plans[number])

    # --- the trainer ----------------------------------------------------------------------------

    def _train(self) -> None:
        if self._training or len(self._ready) < self.setup.groups_per_step:
            return
        chosen = [heappop(self._ready) for _ in range(self.setup.groups_per_step)]
        self._training = sum(self._groups.pop(order).tokens for order in chosen)
        self.meter.train_begins(self.now)
        duration_s = self.setup.trains_for_s(self._chance)
        self._at(self.now + duration_s * SECOND, TRAINED)

    def _trained(self) -> None:
        self.meter.trained(self.now, self._training)
        self._completed, self._training = self._completed + 1, 0
        if self._completed == self.setup.warm_steps:
            self.meter.begin(self.now, self.batches)
        there = [n for n, begins in enumerate(self._begins) if begins <= self.now]
        self._fill(there)
        for number in there:
            self._plan(number)
