"""WHAT TO DO: every command, grouped by who carries it out.

Reads   nothing
Gives   one frozen struct per command, and ENDED_BY: the events that end each

A command stays outstanding in the state until one of its ending events arrives; after a reconnect
it is sent again, and the receiver acts once per command id. Commands without an ending event are
courtesies: losing one delays something, it breaks nothing.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.ids import GroupId, TrajectoryId

# --- session ----------------------------------------------------------------------------------


class AcceptActor(Command, frozen=True, kw_only=True):
    """Give a process its fencing number; carried by the session's welcome."""

    boot_id: str
    incarnation: int


class RefuseActor(Command, frozen=True, kw_only=True):
    """Send a process away: another one has its place, or the run is over."""

    boot_id: str
    reason: str


class StopActor(Command, frozen=True, kw_only=True):
    """Flush, say goodbye and exit 0."""

    reason: str


# --- node -------------------------------------------------------------------------------------


class RestartActor(Command, frozen=True, kw_only=True):
    """Dump the stacks of a process that makes no progress, kill it and start it again."""

    actor: str
    reason: str


# --- trainer ----------------------------------------------------------------------------------


class PublishWeights(Command, frozen=True, kw_only=True):
    """Publish the present weights under this number and wait for a slot if there is none."""

    version: int
    step: int


class TrainStep(Command, frozen=True, kw_only=True):
    """Consume one batch, publish the result as `version`."""

    step: int
    version: int
    trajectories: tuple[TrajectoryId, ...]  #: groups in shuffled order, siblings together


class ExportModel(Command, frozen=True, kw_only=True):
    """Write a Hugging Face directory, load it again, publish what was loaded as `version`."""

    version: int
    step: int


# --- relay ------------------------------------------------------------------------------------


class PinVersion(Command, frozen=True, kw_only=True):
    """Keep this version until another is pinned; -1 unpins."""

    version: int


class ForwardWeights(Command, frozen=True, kw_only=True):
    """Send every newer version to this relay from now on, and to no other; empty: to nobody.

    The command's id numbers the order: a relay keeps to the highest that it has seen.
    """

    successor: str  #: name of the relay, or empty
    address: str  #: its host:port for weights, or empty
    incarnation: int  #: of the successor, 0 for none: another process at the address is refused


# --- rollout ----------------------------------------------------------------------------------


class PullWeights(Command, frozen=True, kw_only=True):
    """Load weights from this machine's relay, or from disk; the replica runs nothing meanwhile."""

    version: int
    exact: bool  #: false: at least this version, the newest that the relay holds
    purpose: str  #: start | newer | evaluation | resume
    #: directory inside the run directory; empty: the relay has the version (always encoded)
    checkpoint: str = msgspec.field(default_factory=str)


class GenerateTrajectory(Command, frozen=True, kw_only=True):
    """Open the trajectory in the store and generate it to its end."""

    trajectory: TrajectoryId
    group: GroupId
    sibling: int
    purpose: str  #: train | eval
    row_index: int
    attempt: int
    placement: int
    version: int
    step: int  #: the step that made the version
    seed: int


class Placed(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A trajectory and the placement that may act on it."""

    trajectory: TrajectoryId
    placement: int


class ScoreTrajectories(Command, frozen=True, kw_only=True):
    """Reward generated trajectories of one group (all of it when rewards are group-scored)."""

    group: GroupId
    row_index: int
    purpose: str
    items: tuple[Placed, ...]


class AbortTrajectories(Command, frozen=True, kw_only=True):
    """Stop generating what runs under these placements or lower ones; nobody waits for it."""

    items: tuple[Placed, ...]


# --- store ------------------------------------------------------------------------------------


class Ending(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How one trajectory ended; enough to write a row for one that was never opened."""

    trajectory: TrajectoryId
    group: GroupId
    sibling: int
    purpose: str
    row_index: int
    placement: int
    end: str  #: trained | evaluated | dropped
    reason: str  #: of a drop, else empty
    step: int  #: that trained it or whose weights were evaluated, -1 for a drop


class EndTrajectories(Command, frozen=True, kw_only=True):
    """Write how trajectories ended and fence every lower placement of them."""

    endings: tuple[Ending, ...]


# --- the batch strategy's worker --------------------------------------------------------------


class Candidate(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a user's batch strategy may know of a finished group."""

    group: GroupId
    row_index: int
    deadline: int
    step: int
    order: int
    num_tokens: int
    scores: tuple[float, ...]


class ProposeBatch(Command, frozen=True, kw_only=True):
    """Ask the user's function which finished groups to train next."""

    step: int
    count: int
    candidates: tuple[Candidate, ...]


ENDED_BY: dict[type[Command], tuple[type[Event], ...]] = {
    AcceptActor: (),
    RefuseActor: (),
    StopActor: (ev.ActorLeft, ev.ProcessExited, ev.HeartbeatLost),
    RestartActor: (ev.ActorJoined, ev.ProcessExited, ev.TimerFired),
    PublishWeights: (ev.WeightsPublished,),
    TrainStep: (ev.StepCompleted,),
    ExportModel: (ev.ModelExported,),
    PinVersion: (),
    ForwardWeights: (ev.RelayLinked,),
    PullWeights: (ev.WeightsLoaded, ev.WeightsRejected, ev.VersionGone, ev.CheckpointRefused),
    GenerateTrajectory: (ev.TrajectoryFinished, ev.TrajectoryFailed, ev.TrajectoriesEnded),
    ScoreTrajectories: (ev.TrajectoryRewarded, ev.TrajectoryFailed, ev.TrajectoriesEnded),
    AbortTrajectories: (),
    EndTrajectories: (ev.TrajectoriesEnded,),
    ProposeBatch: (ev.BatchProposed, ev.TimerFired),
}

ALL_COMMANDS: tuple[type[Command], ...] = tuple(ENDED_BY)

AnyCommand: TypeAlias = (
    AcceptActor
    | RefuseActor
    | StopActor
    | RestartActor
    | PublishWeights
    | TrainStep
    | ExportModel
    | PinVersion
    | ForwardWeights
    | PullWeights
    | GenerateTrajectory
    | ScoreTrajectories
    | AbortTrajectories
    | EndTrajectories
    | ProposeBatch
)
"""The same as a type: what holds a command of any kind is decoded through its tag."""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command on the wire: with its id and the event that caused it."""

    command_id: int
    cause: int  #: event seq
    command: msgspec.Raw
