"""Roles of the processes of a run: the only table of what each is and does.

Reads   nothing
Gives   Role; ROLE_TABLE; ACTOR_ROLES, the roles of processes that join a run; NODE_ROLES, those
        that a node starts; find_roles

An actor's role is part of its name ("rollout-3") and of its join message. Events and commands are
named by their tags. A node starts its processes in the order of the roles. docs/failures.md is made
from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cache


class Role(StrEnum):
    """A role: it reports events or carries out commands."""

    COORDINATOR = "coordinator"
    STRATEGY = "strategy"  #: the coordinator's worker process for a user's batch strategy
    NODE = "node"
    STORE = "store"
    TRAINER = "trainer"
    RELAY = "relay"
    ROLLOUT = "rollout"
    AGENT = "agent"
    RANKS = "ranks"


class Place(Enum):
    """The machines with a process of a role."""

    NONE = auto()  #: the process joins no run
    FIRST = auto()
    EACH = auto()
    SEVERAL = auto()  #: each has as many as replicas
    CHOSEN = auto()  #: those of agents.hosts, if trajectories have sessions
    TRAINER_NODES = auto()  #: those of trainer.nodes, without the first


class Restart(StrEnum):
    """Restarter of an ended process."""

    ALWAYS = "its node"
    IF_KILLED = "its node, if it was killed or its disk was full"
    WITH_CHECKPOINTS = "its node, unless `trainer.save_freq` is 0"
    BY_STARTER = "`laminar train`, or you"
    BY_COORDINATOR = "the coordinator, with the next question"


class Loss(StrEnum):
    """End of the run, or not, if no process comes back in place of a lost one."""

    ENDS = "ends"
    ENDS_WITH_FIRST = "ends with the machine of store and trainer, else continues"
    ENDS_WITH_LAST = "continues, unless it was the last"
    CONTINUES = "continues"


@dataclass(frozen=True, kw_only=True)
class RoleRecord:
    """A role: its place, what it may report and is ordered to do, and what its loss means."""

    reports: tuple[str, ...] = ()  #: in addition to COMMON_TAGS, as in carries_out
    carries_out: tuple[str, ...] = ()
    place: Place
    restart: Restart = Restart.ALWAYS
    loss: Loss
    long_lease: bool = False  #: whether it may be silent for coordinator.node_lease_ms
    is_back_ready: bool = False  #: whether a new process must be ready in time, not only join
    joins_ending: bool = False  #: whether a run that is ending still needs it


ROLE_TABLE: dict[str, RoleRecord] = {
    Role.COORDINATOR: RoleRecord(
        reports=("coordinator-started", "timer-fired", "heartbeat-lost", "node-silent",
                 "node-recovered", "run-stalled", "drain-requested", "run-resumed",
                 "training-warning", "batch-proposed"),
        place=Place.NONE, restart=Restart.BY_STARTER, loss=Loss.ENDS,
    ),
    Role.STRATEGY: RoleRecord(
        carries_out=("propose-batch",),
        place=Place.NONE, restart=Restart.BY_COORDINATOR, loss=Loss.CONTINUES,
    ),
    Role.NODE: RoleRecord(
        reports=("process-exited",), carries_out=("restart-actor",),
        place=Place.EACH, restart=Restart.BY_STARTER, loss=Loss.ENDS_WITH_FIRST,
        long_lease=True, joins_ending=True,
    ),
    Role.STORE: RoleRecord(
        reports=("data-loaded", "trajectories-ended"), carries_out=("end-trajectories",),
        place=Place.FIRST, restart=Restart.IF_KILLED, loss=Loss.ENDS,
        long_lease=True, is_back_ready=True, joins_ending=True,
    ),
    Role.TRAINER: RoleRecord(
        reports=("trainer-ready", "checkpoint-loaded", "step-repeated", "step-completed",
                 "publish-skipped", "model-exported", "checkpoint-saved", "work-progress"),
        carries_out=("publish-weights", "train-step", "load-checkpoint", "repeat-step",
                     "export-model", "save-checkpoint"),
        place=Place.FIRST, restart=Restart.WITH_CHECKPOINTS, loss=Loss.ENDS,
        long_lease=True, is_back_ready=True,
    ),
    Role.RELAY: RoleRecord(
        reports=("relay-ready", "weights-published", "weights-received", "relay-linked",
                 "transfer-problem"),
        carries_out=("pin-version", "forward-weights"),
        place=Place.EACH, loss=Loss.ENDS_WITH_FIRST, is_back_ready=True,
    ),
    Role.ROLLOUT: RoleRecord(
        reports=("replica-ready", "weights-loaded", "weights-rejected", "version-missing",
                 "checkpoint-refused", "trajectory-started", "token-progress",
                 "trajectory-finished", "trajectories-released", "trajectory-failed",
                 "trajectory-rewarded"),
        carries_out=("pull-weights", "generate-trajectory", "score-trajectories",
                     "abort-trajectories", "release-trajectories"),
        place=Place.SEVERAL, loss=Loss.ENDS_WITH_LAST,
    ),
    Role.AGENT: RoleRecord(
        reports=("agent-ready", "turn-requested", "trajectory-failed", "trajectory-rewarded"),
        carries_out=("start-session", "score-trajectories", "abort-trajectories"),
        place=Place.CHOSEN, loss=Loss.ENDS_WITH_LAST, is_back_ready=True,
    ),
    Role.RANKS: RoleRecord(place=Place.TRAINER_NODES, loss=Loss.CONTINUES, long_lease=True),
}  # fmt: skip

ACTOR_ROLES = tuple(role for role in Role if ROLE_TABLE[role].place != Place.NONE)
NODE_ROLES = tuple(role for role in ACTOR_ROLES if role != Role.NODE)
COMMON_TAGS = (
    "actor-joined", "actor-left", "actor-failed", "accept-actor", "refuse-actor", "stop-actor",
)  # fmt: skip
"""Events that each of ACTOR_ROLES reports, and commands that each carries out."""


@cache
def find_roles(tag: str) -> tuple[Role, ...]:
    """Return the roles that report this event or carry out this command, by its tag."""
    if tag in COMMON_TAGS:
        return ACTOR_ROLES
    records = ROLE_TABLE.items()
    return tuple(Role(role) for role, r in records if tag in r.reports + r.carries_out)
