"""A generation engine as a clock: who runs, how fast, and who is finished when. No cache limits it.

Reads   lengths of responses, the engine's timing, the time and the slowness of its process
Gives   finished responses, token counts so far

Pure: time is a Timer, that of a simulated process or of a real one. All sequences of a batch
advance together, so one number (tokens since the start per sequence that ran all the time) tells
the progress of each, and one wake-up is enough for the whole engine.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from laminar.engines.timing import EngineTiming

NEVER = float("inf")


class Timer(Protocol):
    """The time of the process that an engine lives in."""

    slow: float  #: factor on everything that takes time

    def now_ns(self) -> int: ...

    def after(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Call it then, from no other call of the engine."""


@dataclass(slots=True)
class Sequence:
    """One response."""

    id: str
    done: int  #: tokens that an earlier holder generated
    total: int
    hangs: bool = False  #: it is never sampled again, as an environment that does not return
    prompt: int = 0  #: tokens
    begin: float = NEVER  #: value of the clock at its first new token
    slot: bool = False


class BatchClock:
    """Slots, a queue before them, and time."""

    def __init__(
        self,
        timer: Timer,
        timing: EngineTiming,
        slots: int,
        on_finished: Callable[[list[Sequence]], None],
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self._timer = timer
        self._timing = timing
        self._slots = slots
        self._on_finished = on_finished
        self._running = 0
        self._waiting: deque[Sequence] = deque()
        self._clock = 0.0
        self._looked_ns = timer.now_ns()
        self._ends: list[tuple[float, int, str, Sequence]] = []
        self._order = 0
        self._plan = 0
        self._plan_due = False

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self.sequences) - self._running

    @property
    def cached(self) -> int:
        """Tokens of the responses here, as of the last `advance`."""
        return sum(self.tokens(sequence) for sequence in self.sequences.values())

    @property
    def preempted(self) -> int:
        """The cache has no limit."""
        return 0

    def add(self, sequence: Sequence) -> None:
        self.advance()
        self.sequences[sequence.id] = sequence
        self._waiting.append(sequence)
        self._changed()

    def abort(self, sequence_id: str) -> None:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            self.advance()
            self._leave(sequence)
            self._changed()

    def tokens(self, sequence: Sequence) -> int:
        """Tokens of the response so far, as of the last `advance`."""
        if self._clock <= sequence.begin:
            return sequence.done
        return min(sequence.total, sequence.done + int(self._clock - sequence.begin))

    def advance(self) -> None:
        """Bring the clock to the present."""
        now = self._timer.now_ns()
        if self._running:
            self._clock += (now - self._looked_ns) / self._token_ns()
        self._looked_ns = now

    def freeze(self) -> None:
        """The process stands still."""
        self.advance()

    def thaw(self) -> None:
        """It goes on, or at another speed."""
        self._looked_ns = self._timer.now_ns()
        self._changed()

    def _token_ns(self) -> float:
        return self._timer.slow * self._timing.step_ns(self._running)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot:
            sequence.slot = False
            self._running -= 1

    def _changed(self) -> None:
        """Plan anew once everything that happens at this instant has happened."""
        if not self._plan_due:
            self._plan_due = True
            self._timer.after(0, self._replan)

    def _replan(self) -> None:
        self._plan_due = False
        while self._running < self._slots and self._waiting:
            self._admit(self._waiting.popleft())
        while self._ends and not self._ends[0][3].slot:
            heapq.heappop(self._ends)
        self._plan += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._clock)
            self._timer.after(int(left * self._token_ns()) + 1, self._finish, self._plan)

    def _admit(self, sequence: Sequence) -> None:
        if sequence.id not in self.sequences:
            return  # aborted while it waited
        sequence.slot = True
        self._running += 1
        if sequence.hangs:
            return
        prefill = self._timing.prefill_ns(sequence.done) / self._token_ns()
        sequence.begin = self._clock + prefill
        self._order += 1
        end = sequence.begin + (sequence.total - sequence.done)
        heapq.heappush(self._ends, (end, self._order, sequence.id, sequence))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self.advance()
        finished = []
        while self._ends and (self._ends[0][0] <= self._clock + 1e-6 or not self._ends[0][3].slot):
            sequence = heapq.heappop(self._ends)[3]
            if sequence.slot:
                self._clock = max(self._clock, sequence.begin + sequence.total - sequence.done)
                del self.sequences[sequence.id]
                self._leave(sequence)
                finished.append(sequence)
        self._changed()
        if finished:
            self._on_finished(finished)
