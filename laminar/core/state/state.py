"""The state: everything the coordinator knows, as plain data.

Reads   nothing
Gives   State and its parts; `hash_state`, the hash of a state's content; `encode`, `decode`

No floats, no sets, no clocks, no objects that cannot be encoded: the whole state is one MessagePack
value, and a replay must reach the same hash. Dicts are used as ordered sets (value None) where a
decision iterates over them.

A value that equals its default is left out of the encoding, so that a field which a later release
adds changes nothing for a run that does not use it. msgspec compares by identity, which is the same
only for values that exist once: None, False and True, integers from -5 to 256, the empty string and
tuple; and empty dicts and lists, which it inspects. Other defaults need `_encode_default`.
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
    """Return a default that is kept in the encoding, as when it was a plain text."""
    return msgspec.field(default_factory=lambda: value)


class ActorState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A process slot by name; a restarted process gets a higher incarnation."""

    name: str
    role: Role
    node: str
    pid: int
    boot_id: str
    incarnation: int
    alive: bool = True
    ready: bool = False
    silent: bool = False  #: whether a node is silent while its actors respond
    job: str = ""  #: batch-system job that started it; empty: none
    job_restarts: int = 0
    last_peer_seq: int = 0  #: last message number: deduplicates after a coordinator restart
    #: failure of the previous process's engine, if it never had weights
    start_failure: str = ""


class RepackState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Repack's view of one replica: its engine's last reported gauges, and its migrations."""

    max_batch: int = 0  #: most sequences of a decode step within its budget; 0: unknown
    kv_capacity: int = 0  #: tokens
    kv_used: int = 0  #: tokens
    waiting: int = 0  #: trajectories waiting for a slot in the engine
    known_command_id: int = 0  #: highest id of a command to generate that these figures cover
    last_command_id: int = 0  #: id of the last command to generate that it was given
    #: released trajectories that have not started elsewhere; until then it takes no work and loads
    #: nothing
    outgoing: dict[TrajectoryId, None] = {}
    #: trajectories of other replicas for which room is reserved
    incoming: dict[TrajectoryId, None] = {}


class MigrationProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Repack's view of one trajectory: its progress, and the replicas it migrates between."""

    prompt_tokens: int = 0
    sampled: int = 0  #: tokens as last reported; the ledger counts Trajectory.num_tokens
    migrations: int = 0  #: times that it was released
    source: str = ""  #: replica that releases it, until it has started elsewhere
    destination: str = ""  #: replica with reserved room; empty: none, or it is gone


class Replica(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An inference engine, which serves one weight version at a time."""

    name: str
    relay: str  #: name of the relay of its machine, whether it exists or not
    capacity: int  #: trajectories it runs at a time
    version: int = -1  #: loaded; -1 before the first load
    step: int = -1  #: the step that made the loaded version
    digest: str = ""
    groups_taken: int = 0  #: new groups since the load
    loading: bool = False
    #: generating here, each with its placement (also in state.trajectories)
    running: dict[TrajectoryId, int] = {}
    tokens_total: int = 0
    progress_ns: int = 0  #: time when it last sampled, loaded or took work
    failed_loads: int = 0
    repack: RepackState | None = None  #: repack's view; None without repack

    @property
    def outgoing(self) -> dict[TrajectoryId, None]:
        return self.repack.outgoing if self.repack is not None else {}

    @property
    def incoming(self) -> dict[TrajectoryId, None]:
        return self.repack.incoming if self.repack is not None else {}

    @property
    def load(self) -> int:
        """Trajectories that run here, or for which room is reserved."""
        return len(self.running) + len(self.incoming)


class RelayState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A ready relay of one machine: a place in the chain."""

    name: str
    node: str
    chain_address: str  #: host:port for the relay before it
    incarnation: int
    ready_seq: int  #: seq of its ready event
    successor: str = ""  #: relay that it is ordered to feed; empty: none
    held: list[int] = []  #: versions that can be pulled here, ascending
    newest: int = -1  #: highest version that it has reported
    newest_digest: str = ""
    arrived: dict[int, int] = {}  #: time_ns of its report, by held version
    slow_transfers: int = 0  #: transfers in a row that its hop held up
    failed_links: int = 0  #: successors in a row that it could not connect to, or feed


class Trajectory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A trajectory: one attempt at one prompt; core/state/transitions.py has its statuses."""

    id: TrajectoryId
    group: GroupId
    sibling: int
    status: TrajectoryStatus = _encode_default(TrajectoryStatus.DISPATCHED)
    replica: str = ""  #: replica that generates or scores it
    placement: int = 1
    attempt: int = 1
    version: int = 0  #: version that samples it, or did last
    step: int = 0  #: step of the oldest weights which may have sampled parts of it
    num_tokens: int = 0  #: tokens issued in the ledger
    reward_bits: int = -1
    correct: bool = False
    deaths: int = 0  #: replicas that died while they ran it
    batch_timeouts: int = 0  #: times that a batch gave up waiting for it
    restart: bool = False  #: whether lost work must begin again from the prompt


class Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The siblings of one prompt in one pass (or one evaluation sample)."""

    id: GroupId
    purpose: Purpose
    row_index: int
    step: int  #: oldest step whose weights generated for it
    deadline: int  #: last batch index that may train it; -1 for evaluation
    order: int  #: dispatch order, 0-based over the run
    members: list[TrajectoryId]
    unfinished: int  #: members neither rewarded nor ending
    status: GroupStatus = _encode_default(GroupStatus.OPEN)
    end: EndKind = EndKind.NONE  #: end, once its status is ending
    end_reason: DropReason = DropReason.NONE
    mixed: bool = False  #: whether a sibling started over on another version
    sample: int = 0  #: sample index at its evaluation prompt


class Batch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The batch that the trainer works on."""

    step_index: int = msgspec.field(name="step")
    version: int
    groups: list[GroupId]
    deaths: int = 0  #: trainers that it has ended


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step of the log that a returning trainer may have to repeat."""

    step_index: int = msgspec.field(name="step")
    version: int
    trajectory_ids: str  #: ids of its trajectories, in order, separated by blanks
    chain: str  #: digest of the ids of all batches up to this one
    digest: str = ""  #: digest of the published version; empty: not published, or not yet


class Evaluation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A running evaluation on one version; position = row * samples per prompt + sample."""

    index: int
    version: int
    step: int
    final: bool
    queue: list[int]  #: positions still to dispatch, in order
    total: int
    attempts: dict[int, int] = {}  #: attempts at positions that were lost and run again
    done: int = 0
    correct: int = 0
    counts: EvaluationCounts = msgspec.field(default_factory=EvaluationCounts)


class RewardErrors(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counts of scored and failed attempts (core/scheduling/failure_rate.py)."""

    window: bytearray  #: ring with a bit for each of the last attempts: whether it failed
    attempts: int = 0  #: attempts at training samples; the next has bit `attempts` modulo the ring
    failed: int = 0  #: failed attempts in the ring
    unscored_in_row: int = 0  #: training samples without a score since the last attempt
    answers: int = 0  #: samples scored or failed, including evaluations
    errors: dict[str, int] = {}  #: failures of them, by reason
    first: str = ""  #: first error text


class OutstandingCommand(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A command that waits for its ending event."""

    command_id: int
    cause: int
    incarnation: int  #: incarnation of the addressed actor
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
    actors: dict[str, ActorState] = {}
    #: last boot ids of earlier node processes, by node name
    former_boot_ids: dict[str, tuple[str, ...]] = {}
    #: start number of the last member, by name
    start_numbers: dict[str, int] = {}
    replicas: dict[str, Replica] = {}
    #: relays that are ready, by name
    relays: dict[str, RelayState] = {}
    #: names of relays in the order in which weights pass through them
    relay_chain: list[str] = []

    num_train: int = -1  #: -1 until the store has loaded the data
    num_eval: int = 0
    cursor: int = 0  #: next (pass * num_train + position) to dispatch
    origin: ForkOrigin | None = None  #: origin of a fork (core/state/forks.py)
    #: prompts that the origin of a fork had not ended, row index by group: dispatched first
    unfinished_prompts: dict[GroupId, int] = {}

    groups: dict[GroupId, Group] = {}
    trajectories: dict[TrajectoryId, Trajectory] = {}
    next_order: int = 0
    #: finished groups that no batch has taken
    ready: dict[GroupId, None] = {}
    #: unchosen training groups by deadline, for the staleness bound
    deadlines: dict[int, int] = {}
    #: trajectories whose replica is gone, oldest first
    lost_trajectories: dict[TrajectoryId, None] = {}
    #: replica that has the environment's session of a trajectory, if known
    sessions: dict[TrajectoryId, str] = {}
    #: generated trajectories that no live replica is scoring
    unscored: dict[TrajectoryId, None] = {}

    batches_chosen: int = 0  #: batches chosen so far = index of the next one
    steps_completed: int = 0  #: steps completed
    batch: Batch | None = None
    #: completed steps since the oldest checkpoint, and the one that made it; empty without
    #: checkpoints
    trained: list[StepRecord] = []
    steps_repeated: int = -1  #: completed steps of a returning trainer so far; -1: all
    proposal: list[GroupId] | None = None  #: valid answer of the user's strategy
    proposal_failed: bool = False  #: whether to fall back to the default for this batch

    newest_version: int = -1  #: highest published version
    newest_step: int = -1
    newest_digest: str = ""
    #: longest load of a whole version, if twice that exceeds the minimum timeout
    slow_load_ms: int = 0
    version_bytes: int = 0  #: bytes of one version, as of the last load; 0: unknown
    #: ps per byte, as measured last: of hops, by the receiving relay, and of loads
    #: (core/versions/load_sources.py)
    ps_per_byte: dict[str, int] = {}
    #: relays that failed to give an older version and have not responded since
    failed_sources: dict[str, None] = {}
    fastest_hop: int = -1  #: minimum time of a hop for a full version, in ps per byte; -1: unknown
    next_version: int = 0
    #: offsets between version numbers and steps: first version of each range, with its step
    version_steps: dict[int, int] = {}
    owed_version: int = -1  #: version to publish again, skipped or lost with its relay; -1: none
    owed_step: int = -1
    export_version: int = -1  #: version number of the export
    export_path: str = ""
    #: directories of checkpoints, by version: sources of versions evicted by relays
    checkpoint_paths: dict[int, str] = {}
    #: digests of the user's loss and estimator, by setting, as of the first trainer
    function_digests: dict[str, str] = {}
    #: versions with unfinished work, ascending, as last sent to relays
    unfinished_versions: list[int] = []

    evaluation: Evaluation | None = None
    evaluation_due: int = -1  #: lowest version to be evaluated, -1: none
    evaluations: list[EvaluationResult] = []
    next_evaluation: int = 0

    draining: bool = False
    drain_failure: Failure | None = None  #: reason for draining; None: the user asked
    pausing: bool = False  #: whether it drains, and stops when the last step is saved
    #: stopped or paused: open work stays open until the run is resumed
    stopped: bool = False
    failed: Failure | None = None
    exit_code: int = 0

    #: outstanding commands by key, e.g. "generate:0.17.3", in the order of issue
    commands: dict[CommandKey, OutstandingCommand] = {}
    timers: dict[TimerName, int] = {}  #: due time in ns by name
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    ignored: dict[str, int] = {}  #: events that changed nothing, by reason
    rewards: RewardErrors | None = None  #: counts of scoring; None: nothing was scored yet
    #: last calls of environments, the newest one as the lowest bit: whether it failed
    failed_tool_calls: int = 0
    flat_groups_in_row: int = 0  #: groups dropped for no variance since one was kept
    flat_correct_in_row: int = 0  #: flat groups whose siblings are all correct
    nonfinite_in_row: int = 0  #: updates without a finite gradient since weights changed
    warnings: dict[str, str] = {}  #: warnings about training, text by kind, in order of arrival
    #: migration progress of open trajectories, with repack only
    progress: dict[TrajectoryId, MigrationProgress] = {}
    finished: int = 0  #: trajectories generated to their end, with repack only
    finished_tokens: int = 0  #: their tokens, with repack only
    staleness_sum: int = 0  #: sum over trained trajectories
    staleness_max: int = 0

    @property
    def failure(self) -> str:
        """Why the run has failed, as a sentence; empty: it has not."""
        return self.failed.sentence if self.failed is not None else ""

    @property
    def paused(self) -> bool:
        """Whether the run is paused: all processes were ordered to end, and it can be resumed."""
        return self.stopped and self.failed is None

    @property
    def drained_for(self) -> str:
        """Why the run drains, as a sentence; empty: it does not, or the user asked."""
        return self.drain_failure.sentence if self.drain_failure is not None else ""

    @property
    def first_version(self) -> int:
        """The version of the weights that the run begins with."""
        return self.origin.version if self.origin is not None else 0

    @property
    def first_step(self) -> int:
        """The completed steps at the start of the run."""
        return self.origin.step if self.origin is not None else 0

    def is_actor_alive(self, name: str) -> bool:
        actor = self.actors.get(name)
        return actor is not None and actor.alive

    def home_of(self, trajectory: Trajectory) -> str:
        """Return the replica with its environment's session; empty: none, or it is gone."""
        name = self.sessions.get(trajectory.id, "")
        return name if name in self.replicas and self.is_actor_alive(name) else ""

    def live_replicas(self) -> list[Replica]:
        return [r for r in self.replicas.values() if self.is_actor_alive(r.name)]

    def newest_for(self, replica: Replica) -> int:
        """Return the newest version that this replica can pull; -1: none."""
        relay = self.relays.get(replica.relay)
        return -1 if relay is None else relay.newest

    def list_held_versions(self, replica: Replica) -> list[int]:
        """Return all versions that this replica can pull from its relay."""
        relay = self.relays.get(replica.relay)
        return [] if relay is None else relay.held

    def is_in_reach(self, replica: Replica, version: int) -> bool:
        """Return whether this replica can load exactly this version, from its relay or the disk."""
        return version in self.checkpoint_paths or version in self.list_held_versions(replica)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """Encode as one MessagePack value; equal bytes mean equal decisions from here on."""
    return _encoder.encode(state)


def decode(data: bytes | msgspec.Raw) -> State:
    """Decode the result of `encode`; raise msgspec.MsgspecError for anything else."""
    return _decoder.decode(data)


def hash_state(state: State) -> str:
    """Return xxh3_128 of the encoding; dict order counts, since decisions iterate over some."""
    return xxhash.xxh3_128_hexdigest(encode(state))
