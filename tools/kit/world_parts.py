"""What the test world is made of: settings, faults, processes, the store's rows, things to happen.

Reads   nothing
Gives   plain data; the behaviour is in world.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from laminar.core.rules import LOGIC_VERSION, NEW_RUN
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Settings
from laminar.names.ids import GroupId, TrajectoryId

SECOND = 1_000_000_000  #: nanoseconds


def group_of(trajectory_id: TrajectoryId) -> GroupId:
    """Of a training trajectory, by its name."""
    return GroupId(trajectory_id.rpartition(".")[0])


def settings(**changes: Any) -> Settings:
    """Small defaults; a test names what matters to it."""
    values: dict[str, Any] = {
        "seed": 0,
        "groups_per_step": 4,
        "group_size": 4,
        "min_scored": 2,
        "max_staleness": 2,
        "groups_per_version": 2,
        "total_steps": 6,
        "total_epochs": 1,
        "shuffle": True,
        "drop_last": False,
        "test_freq": 0,
        "val_before_train": True,
        "batch_strategy": "deadline",
        "reward_scope": "trajectory",
        "resume_timeout_ms": 3_000,
        "batch_timeout_ms": 60_000,
        "start_timeout_ms": 60_000,
        "stall_ms": 600_000,
        "engine_start_ms": 60_000,
        "max_error_permille": 1000,
        "eval_answers": 1,
        "rules": NEW_RUN,
    }
    return Settings(**(values | changes))


def coordinator_started(
    settings: Settings, incarnation: int = 1, *, logic: int = LOGIC_VERSION, clock_ns: int = 0
) -> ev.CoordinatorStarted:
    """The first event of a coordinator."""
    return ev.CoordinatorStarted(
        incarnation=incarnation, logic=logic, settings=settings, clock_ns=clock_ns, config=""
    )


def rows_left_out(rows: Sequence[str]) -> ev.ExcludedRows:
    """As the trainer reports them; whose they are decides nothing."""
    names = tuple(map(TrajectoryId, rows))
    return ev.ExcludedRows(replica="rollout-0", version=0, diff=0.5, limit=0.1, trajectories=names)


def step_completed(
    step: int, version: int, rows: Sequence[str] = (), **changes: Any
) -> ev.StepCompleted:
    """The trainer's report of a step, that left out some `rows`."""
    values: dict[str, Any] = {
        "step_index": step,
        "version": version,
        "changed": True,
        "reason": "",
        "num_tokens": 1,
        "digest": "",
        "metrics": {},
        "left_out": (rows_left_out(rows),) if rows else (),
    }
    return ev.StepCompleted(**(values | changes))


@dataclass
class Faults:
    """Probabilities per opportunity, and mean virtual seconds."""

    lose_relay_every_s: float = 0.0  #: the same for relays
    damaged_chunk: float = 0.0  #: a transfer between relays has a trouble to report
    wrong_bytes: float = 0.0  #: a relay ends up with a version of another digest
    slow_release: float = 0.0  #: a replica takes long to hand over what it gives away
    deaf: float = 0.0  #: a relay does not get a connection, or what was sent through it
    lose_machine_at_s: float = 0.0  #: the last machine is lost and stays lost, 0: never
    replace_machine_at_s: float = 0.0  #: the first machine is lost and comes back, 0: never
    silent_node_at_s: float = 0.0  #: the last node is paused for SILENCE_S, 0: never
    lose_every_s: float = 0.0  #: mean time until one replica is lost, in one of LOSSES; 0: never
    drain_at_s: float = 0.0  #: Ctrl-C, 0: never
    drain_pauses: bool = False  #: it is no Ctrl-C: the run is to pause
    skip_publish: float = 0.0
    leave_out: float = 0.0  #: the trainer finds that a row did not come from its version
    save: float = 0.0  #: share of steps after which a checkpoint is written
    damage_checkpoint: float = 0.0
    lose_trainer_every_s: float = 0.0  #: as for replicas, but for
    trainer_losses: int = 0  #: so many times: what is done again takes its time
    redo_differs: float = 0.0  #: a step that is done again gives other weights
    fail_sibling: float = 0.0  #: its reward cannot be worked out
    fail_reward: float = 0.0  #: the reward function fails on it
    refuse_sibling: float = 0.0  #: it fails while it is generated
    fatal_role: str = ""  #: its process dies and stays dead ...
    fatal_at_s: float = 0.0  #: ... at this time
    reject_weights: float = 0.0
    repeat_event: float = 0.0  #: an event arrives twice
    slow_tail: float = 0.1  #: share of trajectories that take ten times as long
    hang: float = 0.0  #: share of trajectories that never finish by themselves
    turns: float = 0.0  #: share of turns that an environment answers, of the first TURNS_MAX
    repeat_effects: bool = True  #: whether a lost session's work may be done again
    lost_answer: float = 0.0  #: a session dies while it answers
    restart_s: float = 2.0
    train_s: float = 1.0


@dataclass
class Process:
    name: str
    role: str
    node: str = "node-0"
    incarnation: int = 0
    boot: int = 0
    alive: bool = True
    silent: bool = False  #: a node that stands still
    waiting: list[Any] = field(default_factory=list)  #: what it does when it goes on
    peer_seq: int = 0
    version: int = -1
    pinned: int = -1
    unfinished: tuple[int, ...] = ()  #: versions that are evicted last
    successor: str = ""  #: of a relay
    held: dict[int, tuple[int, str]] = field(default_factory=dict)  #: (step, digest) by version
    work: dict[str, int] = field(default_factory=dict)  #: placement by trajectory
    as_of: int = 0  #: id of the last command to generate
    sampled: int = 0  #: tokens
    gauge_due: bool = False
    sessions: dict[str, int] = field(default_factory=dict)  #: attempt by trajectory
    #: of a trainer: what has made its weights, and the versions of the checkpoints that it keeps
    batches: list[tuple[str, ...]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    rounding: str = ""  #: what makes its weights differ from those of the processes before it

    @property
    def boot_id(self) -> str:
        return f"{self.name}/{self.boot}"


@dataclass
class Row:
    """What the store has of one trajectory."""

    attempt: int = 1
    placement: int = 0  #: lower ones are fenced
    num_tokens: int = 0
    tokens_lost: int = 0  #: of earlier attempts
    generated: bool = False
    version: int = -1  #: of its last tokens
    turns: int = 0  #: that an environment has answered
    end: str = ""


LOSSES = ("dies", "falls silent", "complains", "leaves", "is replaced")


@dataclass(frozen=True)
class Lose:
    """A replica is lost, in one of LOSSES."""

    how: str


@dataclass(frozen=True)
class Kill:
    """The process dies."""


@dataclass(frozen=True)
class Die:
    """The process dies, and its node will not start it again."""


@dataclass(frozen=True)
class Start:
    """A node has started the process again."""

    name: str


@dataclass(frozen=True)
class Replace:
    """A node dies with its processes, and a new one starts them anew."""


SILENCE_S = 3.0


@dataclass(frozen=True)
class Silence:
    """Nothing was heard of a node for its lease, and its actors speak."""


@dataclass(frozen=True)
class Wake:
    """A node that was silent goes on."""


@dataclass(frozen=True)
class Publish:
    """The trainer has handed its weights to the relay."""

    version: int
    step: int
    rounding: str = ""


@dataclass(frozen=True)
class Save:
    """The trainer has written a checkpoint of what these batches have made."""

    version: int
    batches: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Receive:
    """A relay has had a version from the relay before it."""

    version: int
    step: int
    digest: str
    duration_ms: int


@dataclass(frozen=True)
class Load:
    """A replica maps the relay's slot."""

    command: cmd.PullWeights


GAUGE_S = 0.5
PROMPT_TOKENS = 5


@dataclass(frozen=True)
class Gauge:
    """A replica tells of its engine."""


TURNS_MAX = 3


@dataclass(frozen=True)
class Answer:
    """An environment has answered a turn: context is in the store, and then it is said."""

    trajectory_id: str
    placement: int


@dataclass(frozen=True)
class Finish:
    """The last token is sampled, if the trajectory still runs there."""

    trajectory_id: str
    placement: int
