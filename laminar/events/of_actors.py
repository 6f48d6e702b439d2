"""What every actor reports of itself, and what nodes and the store report.

Reads   nothing
Gives   one frozen struct per event, each declared with who reports it and which commands it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, reported_by
from laminar.names.ids import TrajectoryId
from laminar.names.roles import ACTOR_ROLES, Role


@reported_by(*ACTOR_ROLES, ends=(cmd.RestartActor,))
class ActorJoined(Event, frozen=True, kw_only=True):
    """A process said hello for the first time; it has no incarnation yet."""

    name: str
    role: str  #: node | store | trainer | relay | rollout
    boot_id: str
    node: str
    pid: int
    node_boot: str = ""  #: of the process of its node that started it
    start: int = 0  #: which of the processes of its name this one of its node has started; 0: none
    job: str = ""  #: of the batch system, that has started this node; empty: none has
    job_restarts: int = 0  #: how often that job was started before


@reported_by(*ACTOR_ROLES, ends=(cmd.StopActor,))
class ActorLeft(Event, frozen=True, kw_only=True):
    """A process has ended gracefully; its last event, also after it has failed."""


@reported_by(*ACTOR_ROLES)
class ActorFailed(Event, frozen=True, kw_only=True):
    """An actor cannot go on; `user_error` marks a mistake in config, data or model."""

    reason: str
    user_error: bool
    engine: bool = False  #: a replica's engine failed it


@reported_by(
    Role.NODE,
    ends=(
        cmd.StopActor,
        cmd.RestartActor,
    ),
)
class ProcessExited(Event, frozen=True, kw_only=True):
    """An actor's process is gone; `restarting` says whether its node starts it again."""

    actor: str
    boot_id: str
    code: int  #: exit status; -9 is SIGKILL
    restarting: bool
    reason: str = ""  #: why it is not, where its end alone does not say that


@reported_by(Role.STORE)
class DataLoaded(Event, frozen=True, kw_only=True):
    """The prompt pool is durable; rows are 0..num_train-1 and 0..num_eval-1."""

    num_train: int
    num_eval: int
    overlap: int  #: training rows left out because their prompt is held out
    digest: str


class EndedTrajectory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of `trajectories-ended`."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    num_tokens: int  #: sampled tokens that the store holds for it
    tokens_lost: int  #: of earlier attempts, which were thrown away


@reported_by(
    Role.STORE,
    ends=(
        cmd.GenerateTrajectory,
        cmd.ScoreTrajectories,
        cmd.EndTrajectories,
    ),
)
class TrajectoriesEnded(Event, frozen=True, kw_only=True):
    """The store has written how these trajectories ended; it is the answer to a command."""

    command_id: int
    ended: tuple[EndedTrajectory, ...]
