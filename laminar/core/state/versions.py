"""Weight versions: the step of each, the next number, and the record of training.

Reads   state.version_steps, state.export_version; completed batches, the checkpoints that are kept
Writes  state.version_steps, state.next_version, state.trained

Version 0 is the model as it was loaded, and step k makes version k, until a step is repeated after
a loss of the trainer: its first number may have been published, and is not reused. state.trained
records the trained steps that a trainer may have to repeat (core/steps/step_replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.core.state.state import Batch, State, StepRecord
from laminar.names import ids


def step_of(state: State, version: int) -> int:
    """Return the completed steps of this version; the export has those of the last step."""
    if version == state.export_version:
        version -= 1
    for first in reversed(state.version_steps):
        if first <= version:
            return state.version_steps[first] + version - first
    return version


def new_version(state: State, step: int) -> int:
    """Allocate the next version number, for weights of this step."""
    version = state.next_version
    state.next_version += 1
    if step_of(state, version) != step:
        state.version_steps[version] = step
    return version


def step_trained(state: State, batch: Batch, rows: Sequence[str]) -> None:
    """Record a trained batch and its trajectories."""
    if not state.settings.keeps_checkpoints:
        return
    before = state.trained[-1].chain if state.trained else ""
    trained = StepRecord(
        step_index=batch.step_index,
        version=batch.version,
        trajectory_ids=" ".join(rows),
        chain=ids.extend_chain_digest(before, rows),
        digest=state.newest_digest if state.newest_version == batch.version else "",
    )
    state.trained.append(trained)


def version_published(state: State, version: int, digest: str) -> None:
    """Record the digest that a repeated step is compared with."""
    for trained in state.trained:
        if trained.version == version:
            trained.digest = digest


def trim_trained_steps(state: State) -> None:
    """Forget steps that the oldest checkpoint has, since no trainer has to repeat them.

    The record of the step that made it stays: it defines the contents of that checkpoint."""
    found = (step_of(state, version) for version in state.checkpoint_paths)
    steps = [step for step in found if step <= state.steps_completed]
    if steps and state.trained:
        state.trained = [t for t in state.trained if t.step_index + 1 >= min(steps)]
