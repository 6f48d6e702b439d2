"""Parts of the test world: settings, faults, processes, the store's rows, things to happen.

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
    """Return the group in the name of a training trajectory."""
    return GroupId(trajectory_id.rpartition(".")[0])


def settings(**changes: Any) -> Settings:
    """Return small default settings; a test names what matters to it."""
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
    """Return the first event of a coordinator."""
    return ev.CoordinatorStarted(
        incarnation=incarnation, logic=logic, settings=settings, clock_ns=clock_ns, config=""
    )


def rows_left_out(rows: Sequence[str]) -> ev.ExcludedRows:
    """Return rows as the trainer reports them; the replica named decides nothing."""
    names = tuple(map(TrajectoryId, rows))
    return ev.ExcludedRows(replica="rollout-0", version=0, diff=0.5, limit=0.1, trajectories=names)


def step_completed(
    step: int, version: int, rows: Sequence[str] = (), **changes: Any
) -> ev.StepCompleted:
    """Return the trainer's report of a step that left out some `rows`."""
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

    lose_relay_every_s: float = 0.0  #: mean time until a relay is lost; 0: never
    damaged_chunk: float = 0.0  #: a transfer between relays reports a problem
    wrong_bytes: float = 0.0  #: a relay gets a version with another digest
    slow_release: float = 0.0  #: a replica takes long to release trajectories
    deaf: float = 0.0  #: a relay misses a connection, or data sent through it
    lose_machine_at_s: float = 0.0  #: the last machine is lost for good; 0: never
    replace_machine_at_s: float = 0.0  #: the first machine is lost and comes back; 0: never
    silent_node_at_s: float = 0.0  #: the last node is paused for SILENCE_S; 0: never
    lose_every_s: float = 0.0  #: mean time until one replica is lost, in one of LOSSES; 0: never
    drain_at_s: float = 0.0  #: time of a Ctrl-C; 0: never
    drain_pauses: bool = False  #: whether the drain is a pause, not a Ctrl-C
    skip_publish: float = 0.0
    leave_out: float = 0.0  #: a row did not come from its version, as the trainer finds
    save: float = 0.0  #: share of steps after which a checkpoint is written
    damage_checkpoint: float = 0.0
    lose_trainer_every_s: float = 0.0  #: mean time until the trainer is lost; 0: never
    trainer_losses: int = 0  #: maximum number of losses: repeated steps take time
    redo_differs: float = 0.0  #: a repeated step gives other weights
    fail_sibling: float = 0.0  #: the reward of a trajectory cannot be computed
    fail_reward: float = 0.0  #: the reward function fails on a trajectory
    refuse_sibling: float = 0.0  #: a trajectory fails while it is generated
    fatal_role: str = ""  #: role whose process dies and stays dead ...
    fatal_at_s: float = 0.0  #: ... at this time
    reject_weights: float = 0.0
    repeat_event: float = 0.0  #: an event arrives twice
    slow_tail: float = 0.1  #: share of trajectories that take ten times as long
    hang: float = 0.0  #: share of trajectories that never finish by themselves
    turns: float = 0.0  #: share of turns that an environment answers, of the first TURNS_MAX
    repeat_effects: bool = True  #: whether the work of a lost session may be repeated
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
    silent: bool = False  #: whether a node is paused
    waiting: list[Any] = field(default_factory=list)  #: actions due when a paused node resumes
    peer_seq: int = 0
    version: int = -1
    pinned: int = -1
    unfinished: tuple[int, ...] = ()  #: versions that are evicted last
    successor: str = ""  #: successor of a relay
    held: dict[int, tuple[int, str]] = field(default_factory=dict)  #: (step, digest) by version
    work: dict[str, int] = field(default_factory=dict)  #: placement by trajectory
    as_of: int = 0  #: id of the last command to generate
    sampled: int = 0  #: tokens sampled
    gauge_due: bool = False
    sessions: dict[str, int] = field(default_factory=dict)  #: attempt by trajectory
    #: for a trainer: batches that made its weights, and versions of the checkpoints that it keeps
    batches: list[tuple[str, ...]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    rounding: str = ""  #: suffix by which its weights differ from those of earlier processes

    @property
    def boot_id(self) -> str:
        return f"{self.name}/{self.boot}"


@dataclass
class Row:
    """The store's record of one trajectory."""

    attempt: int = 1
    placement: int = 0  #: lower placements are fenced
    num_tokens: int = 0
    tokens_lost: int = 0  #: tokens of earlier attempts
    generated: bool = False
    version: int = -1  #: version of the last tokens
    turns: int = 0  #: turns that an environment has answered
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
    """A node dies with its processes, and a new one restarts them."""


SILENCE_S = 3.0


@dataclass(frozen=True)
class Silence:
    """A node is silent for its lease, while its actors speak."""


@dataclass(frozen=True)
class Wake:
    """A silent node resumes."""


@dataclass(frozen=True)
class Publish:
    """The trainer has copied its weights to the relay."""

    version: int
    step: int
    rounding: str = ""


@dataclass(frozen=True)
class Save:
    """The trainer has written a checkpoint of these batches."""

    version: int
    batches: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Receive:
    """A relay has received a version from the relay before it."""

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
    """A replica reports the gauges of its engine."""


TURNS_MAX = 3


@dataclass(frozen=True)
class Answer:
    """An environment has answered a turn: its context is stored before it is reported."""

    trajectory_id: str
    placement: int


@dataclass(frozen=True)
class Finish:
    """The last token is sampled, if the trajectory still runs there."""

    trajectory_id: str
    placement: int
