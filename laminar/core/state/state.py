"""Everything the coordinator knows, as plain data.

Reads   nothing
Gives   State and its parts; `digest(state)` names a state by its content; `encode`, `decode`

No floats, no sets, no clocks, no objects that cannot be encoded: the whole state is one MessagePack
value, and its hash is what a replay has to reach. Dicts are used as ordered sets (value None)
where a decision walks over them.

What equals its default is left out of the encoding, so that a field which a later release adds
changes nothing for a run that does not use it. msgspec compares by identity, which is the same
only for values that exist once: None, False and True, integers from -5 to 256, the empty string and
tuple; and empty dicts and lists, which it looks into. A default is one of these, or `_written`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import xxhash

from laminar.core.state.evaluation_scores import EvaluationCounts, EvaluationResult
from laminar.core.state.failures import Failure
from laminar.core.state.keys import CommandKey, TimerName
from laminar.core.state.ledger import Ledger
from laminar.core.state.statuses import GroupStatus, Phase, TrajectoryStatus
from laminar.events.base import Settings
from laminar.events.commands import AnyCommand
from laminar.events.of_coordinator import ForkOrigin
from laminar.events.reasons import DropReason, EndKind
from laminar.names.ids import GroupId, Purpose, TrajectoryId
from laminar.names.roles import Role


def _encode_default(value: StrEnum) -> Any:
    """A default that stays in the encoding, as it did when it was a text like any other."""
    return msgspec.field(default_factory=lambda: value)


class Actor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One process slot by name; a restarted process raises the incarnation."""

    name: str
    role: Role
    node: str
    pid: int
    boot_id: str
    incarnation: int
    alive: bool = True
    ready: bool = False
    silent: bool = False  #: a node of which nothing is heard, while its actors speak
    job: str = ""  #: of the batch system, that started it; empty: none did
    job_restarts: int = 0
    last_peer_seq: int = 0  #: the session's dedupe survives a coordinator restart through this
    #: with which the engine of the process before failed it, if that had never had weights
    start_failure: str = ""


class RepackState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What repack knows of one replica: its engine as it was last told, and what is handed over."""

    max_batch: int = 0  #: the most sequences of a decode step within its budget; 0: not said
    kv_capacity: int = 0  #: tokens
    kv_used: int = 0  #: tokens
    waiting: int = 0  #: for a slot in the engine
    as_of: int = 0  #: highest id of a command to generate that these figures know of
    asked: int = 0  #: id of the last command to generate that it was given
    #: trajectories that it gives away and that have not started elsewhere: it takes no work and
    #: loads nothing until there are none
    given: dict[TrajectoryId, None] = {}
    #: room is kept for these, which other replicas give away
    incoming: dict[TrajectoryId, None] = {}


class MigrationProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What repack knows of one trajectory: how far it is, and between which replicas it moves."""

    prompt_tokens: int = 0
    sampled: int = 0  #: tokens, as they were last told; the ledger counts Trajectory.num_tokens
    moves: int = 0  #: times that it was given away
    source: str = ""  #: replica that gives it away, until it has started elsewhere
    destination: str = ""  #: replica with room kept for it; empty: none, or that one is gone


class Replica(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One inference engine. It serves one weight version at a time."""

    name: str
    relay: str  #: name of the relay of its machine, whether there is one or not
    capacity: int  #: trajectories it runs at a time
    version: int = -1  #: loaded; -1 before the first load
    step: int = -1  #: the step that made the loaded version
    digest: str = ""
    took: int = 0  #: new groups since the load
    loading: bool = False
    #: generating here, each with its placement (also in state.trajectories)
    running: dict[TrajectoryId, int] = {}
    tokens_total: int = 0
    progress_ns: int = 0  #: when it last sampled, loaded or took work
    failed_loads: int = 0
    packing: RepackState | None = None  #: what repack needs to know; None without repack

    @property
    def given(self) -> dict[TrajectoryId, None]:
        return self.packing.given if self.packing is not None else {}

    @property
    def incoming(self) -> dict[TrajectoryId, None]:
        return self.packing.incoming if self.packing is not None else {}

    @property
    def load(self) -> int:
        """Trajectories that run here, or for which room is kept."""
        return len(self.running) + len(self.incoming)


class Relay(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The relay of one machine, ready: a place in the chain."""

    name: str
    node: str
    bulk: str  #: host:port for the relay before it
    incarnation: int
    ready_seq: int  #: of the event that said so
    successor: str = ""  #: the relay that it is ordered to feed; empty: none
    held: list[int] = []  #: versions that can be pulled here, ascending
    newest: int = -1  #: highest that it has reported
    newest_digest: str = ""
    arrived: dict[int, int] = {}  #: version, of those held -> time_ns of its report
    lags: int = 0  #: transfers in a row from the relay before it that this hop held up
    unlinked: int = 0  #: orders in a row that it did not carry out in time


class Trajectory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One attempt at one prompt; statuses and moves are in core/state/transitions.py."""

    id: TrajectoryId
    group: GroupId
    sibling: int
    status: TrajectoryStatus = _encode_default(TrajectoryStatus.DISPATCHED)
    replica: str = ""  #: that generates or scores it
    placement: int = 1
    attempt: int = 1
    version: int = 0  #: that samples it, or did last
    step: int = 0  #: that made the oldest weights which may have sampled of it
    num_tokens: int = 0  #: known to the ledger as issued
    score_bits: int = -1
    correct: bool = False
    deaths: int = 0  #: replicas that died while they ran it
    waits: int = 0  #: times that a batch gave up waiting for it
    restart: bool = False  #: lost work that must begin again from the prompt


class Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The siblings of one prompt in one pass (or one held-out prompt of an evaluation)."""

    id: GroupId
    purpose: Purpose
    row_index: int
    step: int  #: oldest step whose weights generated for it
    deadline: int  #: last batch index that may train it; -1 for evaluation
    order: int  #: dispatch order, 0-based over the run
    members: list[TrajectoryId]
    unfinished: int  #: members neither rewarded nor ending
    status: GroupStatus = _encode_default(GroupStatus.OPEN)
    end: EndKind = EndKind.NONE  #: once it is ending
    end_reason: DropReason = DropReason.NONE
    mixed: bool = False  #: a sibling started over on another version
    sample: int = 0  #: which of the answers to its held-out prompt


class Batch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the trainer works on."""

    step_index: int = msgspec.field(name="step")
    version: int
    groups: list[GroupId]
    deaths: int = 0  #: trainers that it has ended


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step that the log has, as a trainer that comes back may have to do it again."""

    step_index: int = msgspec.field(name="step")
    version: int
    rows: str  #: ids of its trajectories, in order, with a blank between two
    chain: str  #: digest of the ids of all batches up to this one
    digest: str = ""  #: of the published version; empty: it was not, or not yet


class Evaluation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Held-out prompts, all on one version; a position is row * answers to each + which of them."""

    index: int
    version: int
    step: int
    final: bool
    queue: list[int]  #: positions still to dispatch, in order
    total: int
    attempts: dict[int, int] = {}  #: of positions that were lost and run again
    done: int = 0
    correct: int = 0
    held_out: EvaluationCounts = msgspec.field(default_factory=EvaluationCounts)


class RewardErrors(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How scoring fared (core/scheduling/failure_rate.py)."""

    window: bytearray  #: a ring with a bit for each of the last attempts: whether it failed
    attempts: int = 0  #: of training answers; the next one has bit `attempts` modulo the ring
    failed: int = 0  #: of those in the ring
    unscored_in_row: int = 0  #: training answers without a score since the last attempt
    answers: int = 0  #: scored or failed, those of evaluations included
    errors: dict[str, int] = {}  #: the failed of them, by reason
    first: str = ""  #: what went wrong the first time


class OutstandingCommand(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A command that waits for its ending event."""

    command_id: int
    cause: int
    incarnation: int  #: of the actor it was addressed to
    command: AnyCommand


class State(msgspec.Struct, kw_only=True, omit_defaults=True, dict=True):
    """The fold of the event log."""

    settings: Settings
    logic: int
    phase: Phase = _encode_default(Phase.STARTING)
    time_ns: int = 0
    seq: int = 0
    coordinator_incarnation: int = 0
    next_incarnation: int = 1

    #: processes by name; role "rollout" has an entry in replicas once it is ready
    actors: dict[str, Actor] = {}
    #: boot ids of the last nodes that had the name of one before, by that name
    former: dict[str, tuple[str, ...]] = {}
    #: by name: which of the processes that its node has started the last member is
    starts: dict[str, int] = {}
    replicas: dict[str, Replica] = {}
    #: relays that are ready, by name
    relays: dict[str, Relay] = {}
    #: their names in the order in which weights pass through them
    chain: list[str] = []

    num_train: int = -1  #: -1 until the store has loaded the data
    num_eval: int = 0
    cursor: int = 0  #: next (pass * num_train + position) to hand out
    origin: ForkOrigin | None = None  #: of a fork (core/state/forks.py)
    #: prompts that the run it was forked from had not ended, row index by group: they go first
    again: dict[GroupId, int] = {}

    groups: dict[GroupId, Group] = {}
    trajectories: dict[TrajectoryId, Trajectory] = {}
    next_order: int = 0
    #: finished groups that no batch has taken
    ready: dict[GroupId, None] = {}
    #: unchosen training groups by deadline, for the staleness bound
    deadlines: dict[int, int] = {}
    #: trajectories whose replica is gone, oldest first
    lost: dict[TrajectoryId, None] = {}
    #: replica that has the environment's session of a trajectory, as far as is known
    sessions: dict[TrajectoryId, str] = {}
    #: generated trajectories that no live replica is scoring
    unscored: dict[TrajectoryId, None] = {}

    chosen: int = 0  #: batches chosen so far = index of the next one
    completed: int = 0  #: steps completed
    batch: Batch | None = None
    #: completed steps since the oldest checkpoint, and the one that made it; none without
    #: checkpoints
    trained: list[StepRecord] = []
    redone: int = -1  #: completed steps that a trainer that came back has by now; -1: all
    proposal: list[GroupId] | None = None  #: a valid answer of the user's strategy
    proposal_failed: bool = False  #: fall back to the default for this batch

    newest: int = -1  #: highest version that was published
    newest_step: int = -1
    newest_digest: str = ""
    #: longest load of a whole version, if twice that is more than the least time for one
    slow_load_ms: int = 0
    version_bytes: int = 0  #: of one version, as the last load told; 0: unknown
    #: ps per byte, as measured last: of hops, by the relay that took it, and of loads
    #: (core/versions/load_sources.py)
    paces: dict[str, int] = {}
    #: relays that failed to give an older version and were not heard of since
    failed_sources: dict[str, None] = {}
    fastest: int = -1  #: least time of a hop for a full version, in ps per byte; -1: unknown
    next_version: int = 0
    #: where the numbers of versions are not those of their steps: the first of them, with its step
    numbered: dict[int, int] = {}
    owed: int = -1  #: version whose publish was skipped, or whose only copy is gone; -1: none
    owed_step: int = -1
    exported: int = -1  #: version number of the export
    export_path: str = ""
    #: directories of checkpoints, by version: what relays have evicted is loaded from there
    saved: dict[int, str] = {}
    #: digests of the user's loss and estimator, by setting, as the first trainer had them
    functions: dict[str, str] = {}
    #: versions with unfinished work, ascending, as relays were told last
    unfinished: list[int] = []

    evaluation: Evaluation | None = None
    evaluation_due: int = -1  #: at least this version is to be evaluated, -1: none
    evaluations: list[EvaluationResult] = []
    next_evaluation: int = 0

    draining: bool = False
    failing: Failure | None = None  #: why the run drains; None: the user asked
    pausing: bool = False  #: it drains, and will be stopped when the last step is saved
    #: at once, or it has paused: what is open stays so, until the run is resumed
    stopped: bool = False
    failed: Failure | None = None
    exit_code: int = 0

    #: by key, e.g. "generate:0.17.3"; the order is the order of issue
    commands: dict[CommandKey, OutstandingCommand] = {}
    timers: dict[TimerName, int] = {}  #: due time in ns by name
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    ignored: dict[str, int] = {}  #: events that changed nothing, by reason
    rewards: RewardErrors | None = None  #: None: nothing was scored yet
    #: the last calls of environments, the newest one as the lowest bit: whether it failed
    failed_calls: int = 0
    flat_in_row: int = 0  #: groups dropped for no variance since one was kept, and
    flat_right: int = 0  #: those of them whose siblings are all right
    warnings: dict[str, str] = {}  #: of bad learning, text by kind, in the order they came
    #: of open trajectories, with repack only
    progress: dict[TrajectoryId, MigrationProgress] = {}
    finished: int = 0  #: trajectories generated to their end, and
    finished_tokens: int = 0  #: their tokens; both with repack only
    staleness_sum: int = 0  #: over trained trajectories
    staleness_max: int = 0

    @property
    def failure(self) -> str:
        """Why the run has failed, as a sentence; empty: it has not."""
        return self.failed.sentence if self.failed is not None else ""

    @property
    def paused(self) -> bool:
        """All its processes have been ordered to end, and it goes on when they are started
        again."""
        return self.stopped and self.failed is None

    @property
    def drained_for(self) -> str:
        """Why it drains, likewise; empty: it does not, or the user asked."""
        return self.failing.sentence if self.failing is not None else ""

    @property
    def first_version(self) -> int:
        """The version of the weights that the run begins with."""
        return self.origin.version if self.origin is not None else 0

    @property
    def first_step(self) -> int:
        """Completed steps when it begins."""
        return self.origin.step if self.origin is not None else 0

    def is_actor_alive(self, name: str) -> bool:
        actor = self.actors.get(name)
        return actor is not None and actor.alive

    def home_of(self, trajectory: Trajectory) -> str:
        """The replica with its environment's session; empty: none, or it is gone."""
        name = self.sessions.get(trajectory.id, "")
        return name if name in self.replicas and self.is_actor_alive(name) else ""

    def live_replicas(self) -> list[Replica]:
        return [r for r in self.replicas.values() if self.is_actor_alive(r.name)]

    def newest_for(self, replica: Replica) -> int:
        """The newest version that this replica can pull; -1: none."""
        relay = self.relays.get(replica.relay)
        return -1 if relay is None else relay.newest

    def list_held_versions(self, replica: Replica) -> list[int]:
        """All versions that this replica can pull from its relay."""
        relay = self.relays.get(replica.relay)
        return [] if relay is None else relay.held

    def is_in_reach(self, replica: Replica, version: int) -> bool:
        """Whether this replica can load this very version: its relay has it, or the disk."""
        return version in self.saved or version in self.list_held_versions(replica)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """One MessagePack value; equal bytes mean equal decisions from here on."""
    return _encoder.encode(state)


def decode(data: bytes | msgspec.Raw) -> State:
    """The state that `encode` was given; msgspec.MsgspecError for anything else."""
    return _decoder.decode(data)


def hash_state(state: State) -> str:
    """xxh3_128 of the encoding; the order of dicts counts, since decisions walk some of them."""
    return xxhash.xxh3_128_hexdigest(encode(state))
