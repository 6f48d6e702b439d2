"""COMMANDS: every command; names/roles.py has the roles that carry it out.

Reads   nothing
Gives   one frozen struct per command; ALL_COMMANDS, in the order in which they are declared

A command stays outstanding in the state until an event that ends it arrives (each event declares
which commands it ends). After a reconnect it is sent again, and the receiver acts at most once per
command id. Commands that no event ends are optional: losing one causes a delay, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

import msgspec

from laminar.events.base import Command
from laminar.events.families import Item
from laminar.events.reasons import DropReason, EndKind, PullPurpose
from laminar.names.ids import GroupId, Purpose, TrajectoryId


class AcceptActor(Command, frozen=True, kw_only=True):
    """Give a process its fencing number; carried by the welcome of the session."""

    boot_id: str
    incarnation: int


class RefuseActor(Command, frozen=True, kw_only=True):
    """Send a process away: another one has its place, or the run has ended."""

    boot_id: str
    reason: str


class StopActor(Command, frozen=True, kw_only=True):
    """Flush, report `actor-left` and exit 0; the node of a paused run exits with its code."""

    reason: str
    paused: bool = False  #: the run continues when its processes are restarted


class RestartActor(Command, frozen=True, kw_only=True):
    """Dump the stacks of a process that makes no progress, kill it and restart it."""

    actor: str
    boot_id: str  #: boot of that process; a later process of the name is left alone
    reason: str
    cut_off: bool = False  #: whether its whole machine was silent: counts towards no limit


class PublishWeights(Command, frozen=True, kw_only=True):
    """Publish the present weights under this number and wait for a slot if there is none."""

    version: int
    step: int


class TrainStep(Command, frozen=True, kw_only=True):
    """Consume one batch, publish the result as `version`."""

    step_index: int = msgspec.field(name="step")
    version: int
    trajectories: tuple[TrajectoryId, ...]  #: groups in shuffled order, siblings together


class LoadCheckpoint(Command, frozen=True, kw_only=True):
    """Load this checkpoint and continue from it; checkpoints that are not kept can be removed."""

    version: int
    step: int
    path: str  #: of its directory, inside the run directory
    kept: tuple[int, ...]  #: versions of all checkpoints that the log confirms


class RepeatStep(Command, frozen=True, kw_only=True):
    """Repeat a step of the log: nothing is published, saved or counted."""

    step_index: int = msgspec.field(name="step")
    version: int
    trajectories: tuple[TrajectoryId, ...]  #: in the order of the first training
    digest: str  #: digest of the published weights; empty: none were published


class ExportModel(Command, frozen=True, kw_only=True):
    """Write a Hugging Face directory, load it again, publish the loaded weights as `version`."""

    version: int
    step: int


class SaveCheckpoint(Command, frozen=True, kw_only=True):
    """Save the present weights, which are this version, unless a checkpoint has them."""

    version: int
    step: int


class PinVersion(Command, frozen=True, kw_only=True):
    """Pin this version (-1: none); among the others, evict versions with unfinished work last.

    The next such command replaces this one."""

    version: int
    unfinished: tuple[int, ...] = ()  #: versions, ascending


class ForwardWeights(Command, frozen=True, kw_only=True):
    """Send every newer version to this relay only from now on; empty: to none.

    The command's id numbers the order: a relay follows the highest id that it has seen."""

    successor: str  #: name of the relay, or empty
    address: str  #: its host:port for weights, or empty
    incarnation: int  #: successor's incarnation, 0: none; another process there is refused


class PullWeights(Command, frozen=True, kw_only=True):
    """Load weights from this machine's relay or from disk; work continues meanwhile only in flight.

    A streaming replica is given work at once, but samples nothing before the weights are
    verified."""

    version: int
    exact: bool  #: false: at least this version, the newest that the relay holds
    purpose: PullPurpose
    #: directory inside the run directory; empty: the relay has the version (always encoded)
    checkpoint: str = msgspec.field(default_factory=str)
    holder: str = ""  #: relay of another machine that has it, if this machine's relay does not
    address: str = ""  #: address where that relay serves versions, host:port


class GenerateTrajectory(Command, frozen=True, kw_only=True):
    """Open the trajectory in the store and generate it to its end."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    group: GroupId
    sibling: int
    purpose: Purpose
    row_index: int
    attempt: int
    placement: int
    version: int
    version_step: int = msgspec.field(name="step")  #: completed steps behind the version
    seed: int


class PlacedTrajectory(Item, frozen=True, kw_only=True, omit_defaults=True):
    """A trajectory and the placement that may act on it."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    placement: int


class StartSession(Command, frozen=True, kw_only=True):
    """Start the session of a trajectory, up to the first turn that it requests."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    group: GroupId
    sibling: int
    purpose: Purpose
    row_index: int
    attempt: int
    placement: int
    version: int  #: oldest weights that may sample its first turn
    version_step: int = msgspec.field(name="step")


OpeningCommand: TypeAlias = GenerateTrajectory | StartSession
"""A command whose actor opens the trajectory in the store, which fences lower placements."""


class ScoreTrajectories(Command, frozen=True, kw_only=True):
    """Reward generated trajectories of one group (all of it when rewards are group-scored).

    A session gets the turn instead, and requests another one or ends."""

    group: GroupId
    row_index: int
    purpose: Purpose
    items: tuple[PlacedTrajectory, ...]


class AbortTrajectories(Command, frozen=True, kw_only=True):
    """Stop generating these placements and lower ones, or end the sessions of their trajectories.

    No event ends this."""

    items: tuple[PlacedTrajectory, ...]


class ReleaseTrajectories(Command, frozen=True, kw_only=True):
    """Stop generating these placements, hand all their tokens to the store, and report it.

    They continue on another replica of the same version (repack)."""

    items: tuple[PlacedTrajectory, ...]


class TrajectoryEnding(Item, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one trajectory; enough to write a row even if it was never opened."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    group: GroupId
    sibling: int
    purpose: Purpose
    row_index: int
    placement: int
    end: EndKind
    reason: DropReason  #: NONE unless it is dropped
    step: int  #: step that trained it or whose weights were evaluated, -1 for a drop


class EndTrajectories(Command, frozen=True, kw_only=True):
    """Write how trajectories ended and fence every lower placement of them."""

    endings: tuple[TrajectoryEnding, ...]


class BatchCandidate(Item, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a finished group that a user's batch strategy may use."""

    group: GroupId
    row_index: int
    deadline: int
    step: int
    order: int
    num_tokens: int
    rewards: tuple[float, ...]


class ProposeBatch(Command, frozen=True, kw_only=True):
    """Ask the user's function which finished groups to train next."""

    step_index: int = msgspec.field(name="step")
    count: int
    candidates: tuple[BatchCandidate, ...]


ALL_COMMANDS: tuple[type[Command], ...] = tuple(Command.__subclasses__())

if TYPE_CHECKING:
    AnyCommand: TypeAlias = Command
else:
    AnyCommand = Union[ALL_COMMANDS]  # noqa: UP007
    """What holds a command of any kind is decoded through its tag."""


class Envelope(Item, frozen=True, kw_only=True):
    """A command on the wire, with its id and the event that caused it."""

    command_id: int
    cause: int  #: event seq
    command: msgspec.Raw
