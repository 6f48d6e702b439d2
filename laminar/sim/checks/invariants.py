"""The invariants of the state (core/invariants.py), by the name of the one that failed.

Reads   a state
Raises  Violation
"""

from __future__ import annotations

from laminar.core import invariants
from laminar.core.state import State
from laminar.sim.runtime.violation import Violation


def state_is_sound(state: State, seq: int) -> None:
    """The state after this event keeps every invariant."""
    try:
        invariants.check(state)
    except AssertionError as error:
        what = f"after event {seq}: {error}"
        raise Violation(_failed_invariant(error), what, *_named(error)) from error


def _failed_invariant(error: AssertionError) -> str:
    """The name of the function that found it."""
    traceback = error.__traceback__
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    known = [invariant.__name__ for invariant in invariants.ALL]
    return next((name for name in names if name in known), "invariant")


def _named(error: AssertionError) -> tuple[str, ...]:
    """Ids of what an invariant complains about."""
    found = [getattr(part, "id", None) or getattr(part, "name", None) for part in error.args]
    return tuple(name for name in found if isinstance(name, str))
