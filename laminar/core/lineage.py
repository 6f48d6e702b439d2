"""Lineage: what the log has of training, as far as a trainer may have to do it again.

Reads   completed batches, published versions, the checkpoints that are kept
Writes  state.trained

Nothing is kept without checkpoints (core/redo.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.core.state import Batch, State, Trained
from laminar.core.versions import step_of
from laminar.names import ids


def step_trained(state: State, batch: Batch, rows: Sequence[str]) -> None:
    """The log has this batch, of these trajectories."""
    if not state.settings.keeps_checkpoints:
        return
    before = state.trained[-1].chain if state.trained else ""
    trained = Trained(
        step_index=batch.step_index,
        version=batch.version,
        rows=" ".join(rows),
        chain=ids.chained(before, rows),
        digest=state.newest_digest if state.newest == batch.version else "",
    )
    state.trained.append(trained)


def version_published(state: State, version: int, digest: str) -> None:
    """What a step that is done again is compared with."""
    for trained in state.trained:
        if trained.version == version:
            trained.digest = digest


def checkpoints_kept(state: State) -> None:
    """What the oldest of them has, no trainer has to do again.

    The record of the step that made it stays: it says what that checkpoint must have.
    """
    found = (step_of(state, version) for version in state.saved)
    steps = [step for step in found if step <= state.completed]
    if steps and state.trained:
        state.trained = [t for t in state.trained if t.step_index + 1 >= min(steps)]
