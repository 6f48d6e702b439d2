"""Numbers of weight versions: which step makes each, and the next one.

Reads   state.numbered, state.exported
Writes  state.numbered, state.next_version

Version 0 is the model as it was loaded, and step k makes version k, until a step is made again
after a loss of the trainer: its first number may have been published, and is not used again.
"""

from __future__ import annotations

from laminar.core.state import State


def step_of(state: State, version: int) -> int:
    """Completed steps of this version, once it is made; the export repeats the last step."""
    if version == state.exported:
        version -= 1
    for first in reversed(state.numbered):
        if first <= version:
            return state.numbered[first] + version - first
    return version


def new_version(state: State, step: int) -> int:
    """The next number, for weights of this step."""
    version = state.next_version
    state.next_version += 1
    if step_of(state, version) != step:
        state.numbered[version] = step
    return version
