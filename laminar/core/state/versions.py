"""Weight versions: which step makes each, the next number, and what the log has of training.

Reads   state.numbered, state.exported; completed batches, the checkpoints that are kept
Writes  state.numbered, state.next_version, state.trained

Version 0 is the model as it was loaded, and step k makes version k, until a step is made again
after a loss of the trainer: its first number may have been published, and is not used again.
state.trained has what was trained, as far as a trainer may have to do it again
(core/steps/step_replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.core.state.state import Batch, State, StepRecord
from laminar.names import ids


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


def step_trained(state: State, batch: Batch, rows: Sequence[str]) -> None:
    """The log has this batch, of these trajectories."""
    if not state.settings.keeps_checkpoints:
        return
    before = state.trained[-1].chain if state.trained else ""
    trained = StepRecord(
        step_index=batch.step_index,
        version=batch.version,
        rows=" ".join(rows),
        chain=ids.extend_chain_digest(before, rows),
        digest=state.newest_digest if state.newest == batch.version else "",
    )
    state.trained.append(trained)


def version_published(state: State, version: int, digest: str) -> None:
    """What a step that is done again is compared with."""
    for trained in state.trained:
        if trained.version == version:
            trained.digest = digest


def trim_trained_steps(state: State) -> None:
    """What the oldest of them has, no trainer has to do again.

    The record of the step that made it stays: it says what that checkpoint must have.
    """
    found = (step_of(state, version) for version in state.saved)
    steps = [step for step in found if step <= state.completed]
    if steps and state.trained:
        state.trained = [t for t in state.trained if t.step_index + 1 >= min(steps)]
