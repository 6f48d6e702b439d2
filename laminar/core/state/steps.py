"""Steps: the batch in training, the steps before it, and those that may have to be repeated.

Reads   nothing
Gives   Steps and its parts Batch, StepRecord
"""

from __future__ import annotations

import msgspec

from laminar.names.ids import GroupId


class Batch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The batch that the trainer works on."""

    step_index: int = msgspec.field(name="step")
    version: int
    groups: list[GroupId]
    deaths: int = 0  #: trainers that it has ended


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step of the log that a returning trainer may have to repeat."""

    step_index: int = msgspec.field(name="step")
    version: int
    trajectory_ids: str  #: ids of its trajectories, in order, separated by blanks
    chain: str  #: digest of the ids of all batches up to this one
    digest: str = ""  #: digest of the published version; empty: not published, or not yet


class Steps(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The optimizer steps of a run."""

    chosen: int = 0  #: batches chosen so far = index of the next one
    completed: int = 0  #: steps completed
    batch: Batch | None = None
    #: completed steps since the oldest checkpoint, and the one that made it; empty without
    #: checkpoints
    trained: list[StepRecord] = []
    work_count: int = 0  #: pieces of work of a process, as last reported by any
    repeated: int = -1  #: completed steps of a returning trainer so far; -1: all
    proposal: list[GroupId] | None = None  #: valid answer of the user's strategy
    proposal_failed: bool = False  #: whether to fall back to the default for this batch
    staleness_sum: int = 0  #: sum over trained trajectories
    staleness_max: int = 0
    #: digests of the user's loss and estimator, by setting, as of the first trainer
    function_digests: dict[str, str] = {}

    def trim_trained(self, saved: list[int]) -> None:
        """Forget steps that the oldest checkpoint has, since no trainer has to repeat them.

        The record of the step that made it stays: it defines the contents of that checkpoint."""
        steps = [step for step in saved if step <= self.completed]
        if steps and self.trained:
            self.trained = [t for t in self.trained if t.step_index + 1 >= min(steps)]
