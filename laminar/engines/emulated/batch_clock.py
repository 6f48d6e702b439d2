"""Clock of an emulated engine: running sequences, their speed, and when they finish.

Reads   lengths of prompts and responses, the engine's timing, the time and slowness of its process
Gives   finished responses, token counts so far

Pure. timed_batch.py computes the batch over time; here it is driven by a Timer, of a simulated
process or a real one, whose time stops and slows down with the process. One wake-up per change of
the batch is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.engines.emulated.timing import EngineTiming


class Timer(Protocol):
    """Time of the process that an engine lives in."""

    slow: float  #: factor on everything that takes time

    def now_ns(self) -> int: ...

    def call_later(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Call the action after the delay, outside of any other call of the engine."""


@dataclass(slots=True)
class ClockSequence:
    """A response in the batch."""

    id: str
    done: int  #: tokens that an earlier replica generated
    total: int
    hangs: bool = False  #: whether sampling never continues, as with an environment that hangs
    prompt: int = 0  #: tokens


class BatchClock:
    """A batch with its waiting sequences, driven by a timer."""

    def __init__(
        self,
        timer: Timer,
        timing: EngineTiming,
        slots: int,
        on_finished: Callable[[list[ClockSequence]], None],
    ) -> None:
        self.sequences: dict[str, ClockSequence] = {}
        self.batch = TimedBatch(timing, slots)
        self._timer = timer
        self._on_finished = on_finished
        self._clock = 0.0  #: nanoseconds of the batch
        self._looked_ns = timer.now_ns()
        self._hanging = 0
        self._plan = 0
        self._plan_due = False
        self.held = False  #: whether sampling is stopped for a load of weights

    @property
    def running(self) -> int:
        return self.batch.running + self._hanging

    def add(self, sequence: ClockSequence) -> None:
        """Add a response; if it hangs, it does not slow the others."""
        self._update_clock()
        self.sequences[sequence.id] = sequence
        if sequence.hangs:
            self._hanging += 1
        else:
            self.batch.add(sequence.id, sequence.prompt, sequence.done, sequence.total, self._clock)
        self._schedule_replan()

    def abort_sequence(self, sequence_id: str) -> None:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self.advance_to_now()
        if sequence.hangs:
            self._hanging -= 1
        elif self.batch.has_sequence(sequence_id):
            self.batch.remove(sequence_id, self._clock)
        self._schedule_replan()

    def count_tokens(self, sequence: ClockSequence) -> int:
        """Return the response's tokens as of the last `advance_to_now`."""
        if sequence.hangs:
            return sequence.done
        return (
            self.batch.count_tokens(sequence.id)
            if self.batch.has_sequence(sequence.id)
            else sequence.total
        )

    def advance_to_now(self) -> None:
        """Advance the batch to the present; finished responses are reported after this instant."""
        self._update_clock()
        self.batch.advance_to(self._clock)
        if self.batch.finished:
            self._schedule_replan()

    def pause_sampling(self) -> None:
        """Stop sampling until `resume_sampling`; the process itself continues."""
        self.advance_to_now()
        self.held = True

    def resume_sampling(self, *, prefills: bool) -> None:
        """Resume sampling; `prefills`: running sequences are prefilled first."""
        self._update_clock()
        self.held = False
        if prefills:
            self.batch.prefill_again(self._clock)
        self._schedule_replan()

    def take_finished(self) -> list[ClockSequence]:
        """Return responses that were finished at the last advance and not yet reported."""
        finished = [self.sequences.pop(i) for i in self.batch.finished if i in self.sequences]
        self.batch.finished.clear()
        return finished

    def resume_time(self) -> None:
        """Resume after a freeze, or at another speed."""
        self._looked_ns = self._timer.now_ns()
        self._schedule_replan()

    def _update_clock(self) -> None:
        now = self._timer.now_ns()
        if not self.held:
            self._clock += (now - self._looked_ns) / self._timer.slow
        self._looked_ns = now

    def _schedule_replan(self) -> None:
        """Replan after all other events of this instant."""
        if not self._plan_due:
            self._plan_due = True
            self._timer.call_later(0, self._replan_now)

    def _replan_if_current(self, plan: int) -> None:
        if plan == self._plan:
            self._replan_now()

    def _replan_now(self) -> None:
        self._plan_due = False
        self._update_clock()
        self.batch.advance_to(self._clock)
        finished = self.take_finished()
        self._plan += 1
        if self.batch.next_ns < math.inf and not self.held:
            left = (self.batch.next_ns - self._clock) * self._timer.slow
            self._timer.call_later(math.ceil(left), self._replan_if_current, self._plan)
        if finished:
            self._on_finished(finished)
