"""Steps that a run trained, according to its event log, and the resulting weights.

Reads   the facts of a run directory
Gives   read_trained_steps: the first weights and all completed steps
Raises  ConfigError for a log that cannot be read
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from laminar.analysis.facts.reader import load_facts
from laminar.names.ids import TrajectoryId


class TrainedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Completed step."""

    step_index: int
    version: int
    trajectories: tuple[TrajectoryId, ...]  #: in the order given to the trainer
    digest: str  #: digest of the version as published; empty if it was not


class TrainedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The trained steps of one run, in order."""

    first_step: int  #: steps completed at the start; for a fork, those of its checkpoint
    first_version: int
    first_digest: str  #: digest of the initial weights; empty if none were published
    first_chain: str  #: digest of the training that made those weights; empty if none
    functions: dict[str, str]  #: digest of each user function's file, by setting
    steps: tuple[TrainedStep, ...]


def read_trained_steps(run_dir: Path) -> TrainedSteps:
    """Return all steps completed in the log so far."""
    facts = load_facts(run_dir)
    state = facts.state
    digests = {row["version"]: row["digest"] for row in facts.rows("versions")}
    steps = (
        TrainedStep(
            step_index=row["step"] - 1,
            version=row["version"],
            trajectories=tuple(row["trajectories"]),
            digest=digests.get(row["version"], ""),
        )
        for row in facts.rows("steps")
        if row["completed"] is not None
    )
    return TrainedSteps(
        first_step=state.data.first_step,
        first_version=state.data.first_version,
        first_digest=digests.get(state.data.first_version, ""),
        first_chain=state.data.origin.digest if state.data.origin is not None else "",
        functions=state.steps.function_digests,
        steps=tuple(steps),
    )
