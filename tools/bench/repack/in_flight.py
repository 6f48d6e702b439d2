"""Model of weights in flight: replicas that load new weights during trajectories.

Reads   Setup
Gives   InFlight, with the same measures as RepackWorld

A model without the core. It obeys the core's staleness bound: a group begins, and a batch is
chosen, only while the inequality of core/scheduling/admission.py holds for the deadline of each
group's oldest token; otherwise replicas and the trainer wait. Nothing drains, so there is nothing
to repack: a replica with room takes the next group at once.

Each new version costs every replica the pause of a load. The replica then continues with its cache
("keep") or first prefills all its sequences ("recompute").
"""

from __future__ import annotations

import math
import random
from bisect import insort
from heapq import heapify, heappop, heappush, heapreplace

from laminar.core.scheduling.admission import bound_holds
from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.names import ids
from tools.bench.repack.measures import GROUP_SIZE, SAMPLE_S, SECOND, Meter, Seen, Setup

SAMPLE, TRAINED, PUBLISHED = -1, -2, -3
"""Kinds of scheduled events; a number from 0 is a change in that replica's batch."""


class Batch(TimedBatch):
    """The batch of an engine whose weights change while it runs."""

    def load(self, now: float, pause_s: float, recompute: bool) -> dict[str, int]:
        """Delay the current step by a load; return the token counts of unfinished sequences."""
        self.advance_to(now)
        self._end_stretch()
        if self._length:
            self._first_ns += pause_s * SECOND
        else:
            self._start = now + pause_s * SECOND
        done = self.unfinished()
        if recompute and self._running:
            ready = self._start + self._first_ns
            for sequence in reversed([*self._running.values()]):
                self._remove_running(sequence)
                self._waiting.appendleft(sequence)
            self._start, self._length = ready, 0
        return done

    def unfinished(self) -> dict[str, int]:
        """Return the token counts of running and waiting sequences."""
        return {name: self.count_tokens(name) for name in self._sequences}


class Group:
    """Siblings of one prompt."""

    def __init__(self, issued: int, step: int) -> None:
        self.issued, self.step, self.unfinished = issued, step, GROUP_SIZE
        self.tokens = 0  #: tokens of the finished siblings
        self.steps = 0  #: sum over tokens of the step of their weights


class InFlight:
    """A run from its start until enough steps are measured."""

    def __init__(self, setup: Setup, recompute: bool = False) -> None:
        self.setup, self.now, self.meter = setup, 0, Meter(setup)
        self._recompute = recompute
        self.batches = [Batch(setup.timing, setup.slots) for _ in range(setup.replicas)]
        chance = random.Random(f"repack/{setup.seed}")
        self._begins = [chance.uniform(0, setup.start_s) * SECOND for _ in self.batches]
        self._groups: dict[int, Group] = {}
        self._deadlines: dict[int, int] = {}  #: number of unchosen groups by deadline
        self._begun = self._chosen = self._completed = 0
        self._step = 0  #: step of the replicas' weights
        self._ready: list[int] = []  #: ready groups, oldest first
        self._refused = (0, 0)  #: (chosen, ready) when a batch last would have broken the bound
        self._training: list[Group] = []  #: empty while the trainer waits
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
            elif what == PUBLISHED:
                self._load()
            elif plan == self._plans[what]:
                self._change(what)
            self._train()
        return self.meter.seen(self.now, self.batches, self._live())

    def _at(self, when: float, what: int, plan: int = 0) -> None:
        heappush(self._heap, (math.ceil(when), what, plan))

    # --- replicas -------------------------------------------------------------------------------

    def _change(self, number: int) -> None:
        self._end(self.batches[number])
        self._fill([number])
        self._plan(number)

    def _end(self, batch: Batch) -> None:
        """Account for finished sequences, whose last tokens have the current weights."""
        batch.advance_to(float(self.now))
        ended, batch.finished = batch.finished, []
        for name in ended:
            order, _, tokens = map(int, name.split("."))
            group = self._groups[order]
            self.meter.latency(self.now - group.issued)
            group.tokens += tokens
            group.steps += tokens * self._step
            group.unfinished -= 1
            if not group.unfinished:
                insort(self._ready, order)

    def _fill(self, numbers: list[int]) -> None:
        """Give new groups, one at a time, to the emptiest of these replicas with room."""
        loads = [(self._load_of(number), number) for number in numbers]
        heapify(loads)
        while loads and loads[0][0] + GROUP_SIZE <= self.setup.capacity and self._admits():
            load, number = loads[0]
            self._begin(self.batches[number])
            heapreplace(loads, (load + GROUP_SIZE, number))

    def _admits(self) -> bool:
        deadline = self._step + self.setup.staleness
        more = self._deadlines | {deadline: self._deadlines.get(deadline, 0) + 1}
        return bound_holds(more, self._chosen, self.setup.groups_per_step)

    def _load_of(self, number: int) -> int:
        return self.batches[number].running + self.batches[number].waiting

    def _begin(self, batch: Batch) -> None:
        order, deadline = self._begun, self._step + self.setup.staleness
        group_id = ids.train_group(0, order)
        for sibling in range(GROUP_SIZE):
            seed = ids.trajectory_seed(self.setup.seed, group_id, sibling, 1)
            total = self.setup.lengths.draw_length(seed)
            batch.add(f"{order}.{sibling}.{total}", 0, 0, total, float(self.now))
        self._groups[order] = Group(self.now, self._step)
        self._deadlines[deadline] = self._deadlines.get(deadline, 0) + 1
        self._begun += 1

    def _plan(self, number: int) -> None:
        batch = self.batches[number]
        batch.advance_to(float(self.now))
        self._plans[number] += 1
        when = self.now if batch.finished else batch.next_ns
        if when < math.inf:
            self._at(when, number, self._plans[number])

    def _load(self) -> None:
        """Load the newest weights, which are one step newer, on all replicas."""
        for batch in self.batches:
            self._end(batch)
            done = batch.load(float(self.now), self.setup.load_s, self._recompute)
            for name, tokens in done.items():
                self._groups[int(name.partition(".")[0])].steps -= tokens
        self._step += 1
        there = [n for n, begins in enumerate(self._begins) if begins <= self.now]
        self._fill(there)
        for number in there:
            self._plan(number)

    # --- the trainer ----------------------------------------------------------------------------

    def _train(self) -> None:
        """Train the oldest ready groups, unless another group would then become too old."""
        size = self.setup.groups_per_step
        mark = (self._chosen, len(self._ready))
        if self._training or len(self._ready) < size or mark == self._refused:
            return
        batch = self._ready[:size]
        rest = dict(self._deadlines)
        for order in batch:
            rest[self._groups[order].step + self.setup.staleness] -= 1
        if not bound_holds(rest, self._chosen + 1, size):
            self._refused = mark
            return
        del self._ready[:size]
        self._deadlines = {deadline: count for deadline, count in rest.items() if count}
        self._training = [self._groups.pop(order) for order in batch]
        tokens = sum(group.tokens for group in self._training)
        ages = [self._chosen - group.step for group in self._training]
        steps = sum(group.steps for group in self._training)
        self.meter.chosen(ages, tokens, self._chosen * tokens - steps)
        self.meter.train_begins(self.now)
        self._at(self.now + self.setup.trains_for_s(self._chosen) * SECOND, TRAINED)
        self._chosen += 1

    def _trained(self) -> None:
        self.meter.trained(self.now, sum(group.tokens for group in self._training))
        self._completed, self._training = self._completed + 1, []
        if self._completed == self.setup.warm_steps:
            self.meter.begin(self.now, self.batches)
        self._at(self.now + self.setup.publish_s * SECOND, PUBLISHED)

    def _live(self) -> int:
        """Return the number of tokens of all groups that are not trained yet."""
        for batch in self.batches:
            self._end(batch)
        groups = [*self._groups.values(), *self._training]
        unfinished = sum(sum(batch.unfinished().values()) for batch in self.batches)
        return sum(group.tokens for group in groups) + unfinished
