"""Plausibility: can what an event says be true at all, whoever says it?

Reads   an event; which versions and steps the state has handed out
Writes  nothing

A broken process may report a version that was never allocated, a negative count or a score that is
no number. Believed, it would break an invariant later and far from its cause; so the machine counts
such an event as "impossible" and changes nothing. What should have come instead has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from laminar.core.state import State
from laminar.events import events as ev
from laminar.events.base import Event

COUNT_MAX = 1 << 40
"""Of tokens or trajectories in one event: sums of them stay far below the 64 bits of the wire."""
ROWS_MAX = 1 << 27
"""Of a data set: one permutation of it is held in memory."""
_EXPONENT = 0x7FF << 52  #: all ones in the float64 of an infinity or a NaN


def plausible(state: State, event: Event) -> bool:
    """False for what no correct process could report in any situation of this run."""
    check = _CHECKS.get(type(event))
    return check is None or check(state, event)


def _allocated(state: State, version: int, step: int) -> bool:
    """A version that was handed out, with the step that makes it.

    Every step makes one, beginning with version 0 of step 0; the export repeats the last step.
    """
    made_by = version - 1 if version == state.exported else version
    return 0 <= version < state.next_version and step == made_by


def _all_allocated(state: State, versions: tuple[int, ...]) -> bool:
    return all(0 <= version < state.next_version for version in versions)


def _count(value: int) -> bool:
    return 0 <= value <= COUNT_MAX


def _data(state: State, event: ev.DataLoaded) -> bool:
    """Steps need rows; a run without a number of steps may have none, and only evaluates."""
    least = 1 if state.settings.total_steps else 0
    return least <= event.num_train <= ROWS_MAX and 0 <= event.num_eval <= ROWS_MAX


def _ends(state: State, event: ev.TrajectoriesEnded) -> bool:
    return all(_count(row.num_tokens) and _count(row.tokens_lost) for row in event.ended)


def _step(state: State, event: ev.StepCompleted) -> bool:
    return _allocated(state, event.version, event.step + 1)


def _weights(state: State, event: ev.PublishSkipped | ev.WeightsLoaded) -> bool:
    return _allocated(state, event.version, event.step)


def _published(state: State, event: ev.WeightsPublished | ev.WeightsReceived) -> bool:
    return _allocated(state, event.version, event.step) and _all_allocated(state, event.held)


def _received(state: State, event: ev.WeightsReceived) -> bool:
    return _published(state, event) and _count(event.num_bytes) and _count(event.duration_ms)


def _saved(state: State, event: ev.CheckpointSaved) -> bool:
    there = event.version in event.kept and _all_allocated(state, event.kept)
    return there and _allocated(state, event.version, event.step)


def _gone(state: State, event: ev.VersionGone) -> bool:
    return _all_allocated(state, event.held)


def _replica(state: State, event: ev.ReplicaReady) -> bool:
    """It must hold one group at least, or it would wait for work that never fits."""
    return state.settings.group_size <= event.max_num_seqs <= COUNT_MAX


def _finished(state: State, event: ev.TrajectoryFinished) -> bool:
    return _count(event.num_tokens)


def _rewarded(state: State, event: ev.TrajectoryRewarded) -> bool:
    """The score is a finite float64, and so is every figure beside it.

    An older log, which counted no tokens here, may have any number of them.
    """
    finite = 0 <= event.score_bits < 1 << 64 and event.score_bits & _EXPONENT != _EXPONENT
    counted = _count(event.num_tokens) or not state.settings.eval_answers
    return finite and counted and all(map(isfinite, event.extras.values()))


_CHECKS: dict[type[Event], Callable[[State, Any], bool]] = {
    ev.DataLoaded: _data,
    ev.TrajectoriesEnded: _ends,
    ev.StepCompleted: _step,
    ev.PublishSkipped: _weights,
    ev.CheckpointSaved: _saved,
    ev.WeightsPublished: _published,
    ev.WeightsReceived: _received,
    ev.ReplicaReady: _replica,
    ev.WeightsLoaded: _weights,
    ev.VersionGone: _gone,
    ev.TrajectoryFinished: _finished,
    ev.TrajectoryRewarded: _rewarded,
}
