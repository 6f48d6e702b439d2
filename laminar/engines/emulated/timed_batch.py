"""Timing of a batch of sequences: continuous batching with a limited cache, without a model.

Reads   EngineTiming, prompt and response lengths, the present time
Gives   running and waiting sequences, tokens so far, finished sequences and times of changes

Pure. The batch makes whole decode steps; each gives every running sequence one token. At the start
of a step, while the cache lacks room for the tokens of that step, the sequence that was admitted
last loses its cache and waits again, before all others (preemption by recompute). If none was
preempted, waiting sequences are admitted as long as there is room. An admitted sequence is
prefilled, its earlier tokens included, and all others wait for that.

Between two changes of the batch the length of a step grows by a constant amount, so many steps are
one sum: nothing here takes time in proportion to the steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from laminar.engines.emulated.timing import EngineTiming

SPARE_SHARE = 0.01
"""Share of the cache that admission leaves free: else the next steps would preempt again."""

NO_LIMIT = 1 << 62  #: tokens: more than any cache must hold


@dataclass(slots=True, eq=False)
class _TimedSequence:
    """State of a response in the batch."""

    id: str
    prompt: int
    tokens: int
    total: int
    since: int = 0  #: step at which it had `tokens`
    end: int = 0  #: step after which it is finished
    runs: bool = False
    wanted: bool = True  #: False once removed

    @property
    def cached(self) -> int:
        """Tokens of its cache at step `since`."""
        return self.prompt + self.tokens


class TimedBatch:
    """The batch of an engine; times are nanoseconds of the engine's clock and never go back."""

    def __init__(self, timing: EngineTiming, slots: int) -> None:
        """Set up; `slots`: limit of running sequences."""
        self.finished: list[str] = []  #: in order, until taken
        self.preempted = 0  #: number of preemptions so far
        self.prefilled = 0  #: tokens
        self._timing, self._slots = timing, slots
        self._capacity = timing.cache_tokens or NO_LIMIT
        self._sequences: dict[str, _TimedSequence] = {}
        self._running: dict[str, _TimedSequence] = {}  #: in the order of admission
        self._waiting: deque[_TimedSequence] = deque()
        self._ends: list[tuple[int, int, _TimedSequence]] = []
        self._order = 0
        # The stretch: steps with the same sequences, of which the first has begun.
        self._start = 0.0  #: its start time
        self._steps = 0  #: steps made before it
        self._cached = 0  #: tokens in the cache at its start
        self._length = 0  #: steps in it; 0: nothing runs
        self._first_ns = 0.0  #: duration of its first step, prefill included
        self._made = 0  #: steps of it that are complete
        self._sampled = 0  #: tokens sampled before it

    # --- queries ------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds."""
        return self._capacity

    @property
    def cached(self) -> int:
        """Tokens in the cache, as of the last `advance_to`."""
        return self._cached + self._made * len(self._running)

    @property
    def sampled(self) -> int:
        """Tokens of all responses so far."""
        return self._sampled + self._made * len(self._running)

    @property
    def next_ns(self) -> float:
        """Time of the next change of the batch by itself; infinity: never."""
        return self._start + self._compute_duration(self._length) if self._length else math.inf

    def has_sequence(self, sequence_id: str) -> bool:
        """Return whether the sequence runs or waits."""
        return sequence_id in self._sequences

    def count_tokens(self, sequence_id: str) -> int:
        """Return the response's tokens as of the last `advance_to`."""
        found = self._sequences[sequence_id]
        if not found.runs:
            return found.tokens
        return found.tokens + self._steps + self._made - found.since

    # --- changes ------------------------------------------------------------------------------

    def add(self, sequence_id: str, prompt: int, done: int, total: int, now: float) -> None:
        """Add a response of `total` tokens, `done` of them earlier; equal times begin together."""
        if self._length or now > self._start:
            self.advance_to(now)
        self._end_stretch()
        added = self._sequences[sequence_id] = _TimedSequence(sequence_id, prompt, done, total)
        self._waiting.append(added)

    def remove(self, sequence_id: str, now: float) -> None:
        """Remove a sequence."""
        self.advance_to(now)
        self._end_stretch()
        removed = self._sequences.pop(sequence_id)
        removed.wanted = False
        if removed.runs:
            self._remove_running(removed)
            if not self._running:
                self._start, self._length = now, 0

    def prefill_again(self, now: float) -> None:
        """Drop the cache of all running sequences; they are readmitted first, in the same order."""
        self.advance_to(now)
        self._end_stretch()
        for sequence in reversed(list(self._running.values())):
            self._remove_running(sequence)
            self._waiting.appendleft(sequence)
        self._start, self._length = now, 0

    def advance_to(self, now: float) -> None:
        """Advance the batch to the present."""
        while True:
            if not self._length and not self._begin_stretch():
                self._start = max(self._start, now)
                return
            end = self._start + self._compute_duration(self._length)
            if end > now:
                self._made = self._made_by(now)
                return
            self._apply_steps(self._length)
            self._start, self._length = end, 0
            self._remove_finished()

    # --- steps --------------------------------------------------------------------------------

    def _compute_duration(self, steps: int) -> float:
        """Return the duration of the first steps of the stretch."""
        if steps <= 1:
            return self._first_ns * steps
        number, after = len(self._running), steps - 1
        second = self._timing.step_ns(number, self._cached + number)
        growth = self._timing.token_us * 1e3 * number
        return self._first_ns + after * second + growth * (after * (after - 1) // 2)

    def _made_by(self, now: float) -> int:
        """Return the whole steps of the stretch until then, fewer than all."""
        left = now - self._start - self._first_ns
        if left < 0:
            return 0
        number = len(self._running)
        second = self._timing.step_ns(number, self._cached + number)
        growth = self._timing.token_us * 1e3 * number
        # growth/2 x^2 + (second - growth/2) x = left, in the form that also takes growth = 0
        linear = second - growth / 2
        after = int(2 * left / (linear + math.sqrt(linear * linear + 2 * growth * left)))
        steps = min(1 + after, self._length - 1)
        while self._start + self._compute_duration(steps) > now:
            steps -= 1
        while steps + 1 < self._length and self._start + self._compute_duration(steps + 1) <= now:
            steps += 1
        return steps

    def _apply_steps(self, steps: int) -> None:
        number = len(self._running)
        self._steps += steps
        self._cached += steps * number
        self._sampled += steps * number
        self._made = 0

    def _end_stretch(self) -> None:
        """End the stretch after the current step, whose duration does not change."""
        if self._length <= 1:
            return
        made = self._made
        step_ns = self._compute_duration(made + 1) - self._compute_duration(made)
        self._start += self._compute_duration(made)
        self._apply_steps(made)
        self._first_ns, self._length = step_ns, 1

    def _begin_stretch(self) -> bool:
        """Begin the next steps with the same sequences; return False if there are none."""
        preempted = False
        while len(self._running) > 1 and self._cached + len(self._running) > self._capacity:
            self._preempt_last()
            preempted = True
        prefill = 0 if preempted else self._admit_waiting()
        number = len(self._running)
        if not number:
            return False
        while not self._ends[0][2].runs or self._ends[0][2].end != self._ends[0][0]:
            heappop(self._ends)
        self._length = self._ends[0][0] - self._steps
        if number > 1:  # a single sequence continues, however long it is
            self._length = min(self._length, (self._capacity - self._cached) // number)
        step_ns = self._timing.step_ns(number, self._cached)
        self._first_ns = step_ns + self._timing.prefill_ns(prefill)
        self._made = 0
        return True

    # --- sequences ----------------------------------------------------------------------------

    def _preempt_last(self) -> None:
        """Preempt the sequence that was admitted last: it becomes the first to wait."""
        last = next(reversed(self._running.values()))
        self._remove_running(last)
        self._waiting.appendleft(last)
        self.preempted += 1

    def _admit_waiting(self) -> int:
        """Admit waiting sequences as room allows; return the tokens that this prefills."""
        prefill, limit = 0, self._capacity - int(SPARE_SHARE * self._capacity)
        while self._waiting and len(self._running) < self._slots:
            first = self._waiting[0]
            if not first.wanted:
                self._waiting.popleft()
                continue
            wanted = self._cached + first.cached + len(self._running) + 1
            if self._running and wanted > limit:
                break
            self._waiting.popleft()
            prefill += first.cached
            self._add_running(first)
        self.prefilled += prefill
        return prefill

    def _add_running(self, sequence: _TimedSequence) -> None:
        sequence.runs, sequence.since = True, self._steps
        sequence.end = self._steps + sequence.total - sequence.tokens
        self._running[sequence.id] = sequence
        self._cached += sequence.cached
        self._order += 1
        heappush(self._ends, (sequence.end, self._order, sequence))

    def _remove_running(self, sequence: _TimedSequence) -> None:
        """Remove a sequence from the running batch; it keeps its token count."""
        sequence.tokens += self._steps - sequence.since
        sequence.runs = False
        del self._running[sequence.id]
        self._cached -= sequence.cached

    def _remove_finished(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            end, _, sequence = heappop(self._ends)
            if sequence.runs and sequence.end == end:
                self._remove_running(sequence)
                del self._sequences[sequence.id]
                self.finished.append(sequence.id)
