"""What the trainer reports.

Reads   nothing
Gives   one frozen struct per event, each declared with who reports it and which commands it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, reported_by
from laminar.names.ids import TrajectoryId
from laminar.names.roles import Role


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One that is on disk, by what it says of itself."""

    version: int
    step: int
    path: str  #: of its directory, inside the run directory
    digest: str  #: chained over the ids of all batches that made it


class TrainFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function of the user that makes losses or advantages."""

    setting: str
    digest: str  #: of its file


@reported_by(Role.TRAINER)
class TrainerReady(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The policy is loaded as the run began with it, and its first slot is granted."""

    num_parameters: int
    weights_bytes: int
    checkpoints: tuple[Checkpoint, ...] = ()  #: that training can go on from
    functions: tuple[TrainFunction, ...] = ()


@reported_by(Role.TRAINER, ends=(cmd.LoadCheckpoint,))
class CheckpointLoaded(Event, frozen=True, kw_only=True):
    """Parameters, optimizer and all else are those of this checkpoint."""

    version: int
    step: int


@reported_by(Role.TRAINER, ends=(cmd.RedoStep,))
class StepRedone(Event, frozen=True, kw_only=True):
    """A batch that the log has was trained again; its weights went to nobody."""

    step_index: int = msgspec.field(name="step")  #: index from 0
    version: int  #: under which it was trained the first time
    digest: str  #: of the weights as they would be published
    published: str  #: of those that were; empty: none were, or it is not known


class ExcludedRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a batch that were not trained: an engine that sampled of them had other weights."""

    replica: str
    version: int
    diff: float  #: mean |log p(trainer) - log p(engine)| of the tokens that it sampled, nats
    limit: float  #: what weights of their age may differ by; nats
    trajectories: tuple[TrajectoryId, ...]


@reported_by(Role.TRAINER, ends=(cmd.TrainStep,))
class StepCompleted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The optimizer has consumed one batch and the trainer's own book has it on disk."""

    step_index: int = msgspec.field(name="step")  #: index from 0
    version: int  #: number of the weights that this step made
    changed: bool  #: false: the step had no signal and left the weights as they were
    reason: str  #: why not, else empty
    num_tokens: int
    digest: str  #: xxh3_128 of the ids of the batch, in order
    metrics: dict[str, float]
    left_out: tuple[ExcludedRows, ...] = ()


@reported_by(Role.TRAINER)
class PublishSkipped(Event, frozen=True, kw_only=True):
    """No slot was free in time: these weights are owed and the trainer went on."""

    version: int
    step: int
    reason: str


@reported_by(Role.TRAINER, ends=(cmd.ExportModel,))
class ModelExported(Event, frozen=True, kw_only=True):
    """The export was written, loaded again, and its weights are on their way to the relay."""

    version: int
    path: str


@reported_by(Role.TRAINER, ends=(cmd.SaveCheckpoint,))
class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A version is on disk, whole and synced, for replicas of every machine."""

    version: int
    step: int
    path: str  #: of its directory, inside the run directory
    kept: tuple[int, ...]  #: versions whose checkpoints are there now, ascending
