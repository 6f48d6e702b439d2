"""Validation: whether the content of an event is possible, regardless of its sender.

Reads   an event; the versions and steps that the state has allocated
Writes  nothing

A broken process may report a version that was never allocated, a negative count or a score that is
not a number. Accepted, it would break an invariant later and far from its cause; so the machine
counts such an event as "impossible" and changes nothing. The event that should have come has a
deadline. The handler of each event names its check.
"""

from __future__ import annotations

from typing import Protocol

from laminar.core.state.state import State
from laminar.events.base import Event

COUNT_MAX = 1 << 40
"""The most tokens or trajectories in one event: sums of them stay far below the wire's 64 bits."""
ROWS_MAX = 1 << 27  #: the most rows of a data set: one permutation of it is held in memory


class VersionedEvent(Protocol):
    """An event about weights."""

    @property
    def version(self) -> int: ...

    @property
    def step(self) -> int: ...


def accept_any(state: State, event: Event) -> bool:
    """Accept any content: it is harmless, or the handler checks it."""
    return True


def of_a_version(state: State, event: VersionedEvent) -> bool:
    return is_allocated(state, event.version, event.step)


def is_allocated(state: State, version: int, step: int) -> bool:
    """Return whether the version was allocated, for this step."""
    return 0 <= version < state.versions.next and step == state.versions.step_of(version)


def are_allocated(state: State, versions: tuple[int, ...]) -> bool:
    return all(0 <= version < state.versions.next for version in versions)


def is_count(value: int) -> bool:
    return 0 <= value <= COUNT_MAX
