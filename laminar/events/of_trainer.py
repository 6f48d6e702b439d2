"""Events that the trainer reports.

Reads   nothing
Gives   one frozen struct per event, each declared with the commands that it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, ends_commands
from laminar.events.families import Item
from laminar.names.ids import TrajectoryId


class Checkpoint(Item, frozen=True, kw_only=True):
    """A checkpoint on disk, as it describes itself."""

    version: int
    step: int
    path: str  #: of its directory, inside the run directory
    digest: str  #: chained digest over the ids of all batches that made it


class TrainFunction(Item, frozen=True, kw_only=True):
    """A user function that computes losses or advantages."""

    setting: str
    digest: str  #: digest of its file


class TrainerReady(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The policy is loaded as at the start of the run, and its first slot is granted."""

    num_parameters: int
    weights_bytes: int
    checkpoints: tuple[Checkpoint, ...] = ()  #: checkpoints that training can continue from
    functions: tuple[TrainFunction, ...] = ()


@ends_commands(cmd.LoadCheckpoint)
class CheckpointLoaded(Event, frozen=True, kw_only=True):
    """Parameters, optimizer and all other state are those of this checkpoint."""

    version: int
    step: int


@ends_commands(cmd.RepeatStep)
class StepRepeated(Event, frozen=True, kw_only=True):
    """A batch of the log was trained again; its weights were not published."""

    step_index: int = msgspec.field(name="step")  #: index from 0
    version: int  #: version of its first training
    digest: str  #: digest of the weights as they would be published
    published: str  #: digest of those that were; empty: none were published, or it is unknown


class ExcludedRows(Item, frozen=True, kw_only=True):
    """Rows of a batch that were not trained: an engine that sampled them had other weights."""

    replica: str
    version: int
    diff: float  #: mean |log p(trainer) - log p(engine)| of the tokens that it sampled, nats
    limit: float  #: largest difference allowed at the age of the weights; nats
    trajectories: tuple[TrajectoryId, ...]


@ends_commands(cmd.TrainStep)
class StepCompleted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The optimizer has consumed one batch, and the trainer's step log has it on disk."""

    step_index: int = msgspec.field(name="step")  #: index from 0
    version: int  #: number of the weights that this step made
    changed: bool  #: false: the step had no signal and left the weights unchanged
    reason: str  #: reason for unchanged weights, else empty
    num_tokens: int
    digest: str  #: xxh3_128 of the ids of the batch, in order
    metrics: dict[str, float]
    left_out: tuple[ExcludedRows, ...] = ()
    nonfinite_updates: int = 0  #: updates skipped because their gradient was not finite


class PublishSkipped(Event, frozen=True, kw_only=True):
    """No slot was free in time: these weights are published later, and the trainer continued."""

    version: int
    step: int
    reason: str


@ends_commands(cmd.ExportModel)
class ModelExported(Event, frozen=True, kw_only=True):
    """The export was written and loaded again, and its weights are on their way to the relay."""

    version: int
    path: str


@ends_commands(cmd.SaveCheckpoint)
class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A version is on disk, complete and synced, for replicas of every machine."""

    version: int
    step: int
    path: str  #: of its directory, inside the run directory
    kept: tuple[int, ...]  #: versions whose checkpoints exist now, ascending
