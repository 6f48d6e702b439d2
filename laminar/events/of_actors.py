"""Events that every actor reports of itself, and events of nodes and the store.

Reads   nothing
Gives   one frozen struct per event, each declared with the commands that it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, ends_commands
from laminar.events.families import Item
from laminar.names.ids import TrajectoryId


@ends_commands(cmd.RestartActor)
class ActorJoined(Event, frozen=True, kw_only=True):
    """A process sent its first hello; it has no incarnation yet."""

    name: str
    role: str  #: node | store | trainer | relay | rollout
    boot_id: str
    node: str
    pid: int
    node_boot: str = ""  #: boot of the node process that started it
    start: int = 0  #: number among the node's processes of this name; 0: not started by a node
    job: str = ""  #: batch-system job that started this node; empty: none
    job_restarts: int = 0  #: number of earlier starts of that job


@ends_commands(cmd.StopActor)
class ActorLeft(Event, frozen=True, kw_only=True):
    """A process has ended gracefully; its last event, also after a failure."""


class ActorFailed(Event, frozen=True, kw_only=True):
    """An actor cannot continue; `user_error` marks a mistake in config, data or model."""

    reason: str
    user_error: bool
    engine: bool = False  #: whether a replica's engine caused the failure
    link: bool = False  #: whether a link to another process failed: its work is not to blame


@ends_commands(cmd.StopActor, cmd.RestartActor)
class ProcessExited(Event, frozen=True, kw_only=True):
    """An actor's process is gone; `restarting` says whether its node restarts it."""

    actor: str
    boot_id: str
    code: int  #: exit status; -9 is SIGKILL
    restarting: bool
    reason: str = ""  #: reason not to restart it, where its exit alone does not explain that


class WorkProgress(Event, frozen=True, kw_only=True):
    """A process works on one order for long: a gauge, reported only when the count has changed."""

    count: int  #: pieces of work since its start: passes of the model, blocks of bytes


class DataLoaded(Event, frozen=True, kw_only=True):
    """The prompt pool is durable; rows are 0..num_train-1 and 0..num_eval-1."""

    num_train: int
    num_eval: int
    overlap: int  #: training rows left out because their prompt is in the evaluation set
    digest: str


class EndedTrajectory(Item, frozen=True, kw_only=True):
    """The end of one trajectory in `trajectories-ended`."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    num_tokens: int  #: sampled tokens of it that the store holds
    tokens_lost: int  #: discarded tokens of earlier attempts


@ends_commands(cmd.GenerateTrajectory, cmd.ScoreTrajectories, cmd.EndTrajectories)
class TrajectoriesEnded(Event, frozen=True, kw_only=True):
    """The store has written how these trajectories ended; ends one command."""

    command_id: int
    ended: tuple[EndedTrajectory, ...]
