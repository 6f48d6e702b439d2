"""Validation: can what an event says be true at all, whoever says it?

Reads   an event; which versions and steps the state has handed out
Writes  nothing

A broken process may report a version that was never allocated, a negative count or a score that is
no number. Believed, it would break an invariant later and far from its cause; so the machine counts
such an event as "impossible" and changes nothing. What should have come instead has a deadline.
Which of these an event has to pass stands at its handler.
"""

from __future__ import annotations

from typing import Protocol

from laminar.core.state.state import State
from laminar.core.state.versions import step_of
from laminar.events.base import Event

COUNT_MAX = 1 << 40
"""The most tokens or trajectories in one event: sums of them stay far below the 64 bits of the
wire."""
ROWS_MAX = 1 << 27
"""The most rows of a data set: one permutation of it is held in memory."""


class VersionedEvent(Protocol):
    """An event about weights."""

    @property
    def version(self) -> int: ...

    @property
    def step(self) -> int: ...


def accept_any(state: State, event: Event) -> bool:
    """Whatever such an event says can be true, or does no harm: its handler looks it up."""
    return True


def of_a_version(state: State, event: VersionedEvent) -> bool:
    return is_allocated(state, event.version, event.step)


def is_allocated(state: State, version: int, step: int) -> bool:
    """A version that was handed out, with the step that makes it."""
    return 0 <= version < state.next_version and step == step_of(state, version)


def are_allocated(state: State, versions: tuple[int, ...]) -> bool:
    return all(0 <= version < state.next_version for version in versions)


def is_count(value: int) -> bool:
    return 0 <= value <= COUNT_MAX
