"""WHAT HAPPENED: every event, grouped by who reports it.

Reads   nothing
Gives   one frozen struct per event; the sender and the handler of each are in events/index.py

An event never carries payloads (tokens, weights): it names what is already durable elsewhere.
"""

from __future__ import annotations

import msgspec

from laminar.events.base import Event, Settings
from laminar.ids import GroupId, TrajectoryId

# --- the coordinator itself -------------------------------------------------------------------


class CoordinatorStarted(Event, frozen=True, kw_only=True):
    """First record of every coordinator incarnation."""

    incarnation: int
    logic: int  #: version of the decision rules; an unknown one is refused
    settings: Settings
    clock_ns: int  #: this machine's time of day; event times are relative to it
    config: str  #: the resolved configuration as TOML, without secrets


class TimerFired(Event, frozen=True, kw_only=True):
    """A time that the state was waiting for has come; a timer that is no longer set is ignored."""

    timer: str


class HeartbeatLost(Event, frozen=True, kw_only=True):
    """The failure detector gave up on an actor: nothing was heard for the lease."""

    actor: str
    actor_incarnation: int
    silent_ms: int


class NodeSilent(Event, frozen=True, kw_only=True):
    """Nothing was heard of a node for its lease, while processes of its machine go on speaking."""

    node: str
    node_incarnation: int
    silent_ms: int


class NodeHeard(Event, frozen=True, kw_only=True):
    """A node that was silent speaks again."""

    node: str
    node_incarnation: int


class DrainRequested(Event, frozen=True, kw_only=True):
    """The user asked the run to end in good order (Ctrl-C), or at once (a second one)."""

    reason: str
    at_once: bool = False  #: neither complete the step in training nor export the model


class EventGivenUp(Event, frozen=True, kw_only=True):
    """Too many coordinators crashed on an event: it is not handled any more, and the run fails."""

    what: str  #: its name, and who sent it
    crashes: int
    error: str  #: of the last one
    actor: str  #: its sender
    actor_incarnation: int
    peer_seq: int  #: the session's number of the message: it counts as received
    timer: str  #: the timer that it was, else empty
    ended_by: int = 0  #: the command to the store that it answered (trajectories-ended), else 0

    @property
    def reason(self) -> str:
        """Of the failed run."""
        return f"the coordinator crashed {self.crashes} times on {self.what}: {self.error}"


class TrainingWarning(Event, frozen=True, kw_only=True):
    """Learning goes badly in a way that a person should look at; each kind comes once in a run."""

    kind: str  #: no-signal, truncated, ...: docs/training.md
    step: int  #: completed steps when it was seen
    text: str  #: the figure, its limit, and what to look at


class BatchProposed(Event, frozen=True, kw_only=True):
    """The user's batch strategy answered; `groups` is empty when it failed."""

    step: int
    groups: tuple[GroupId, ...]
    detail: str = ""


# --- every actor ------------------------------------------------------------------------------


class ActorJoined(Event, frozen=True, kw_only=True):
    """A process said hello for the first time; it has no incarnation yet."""

    name: str
    role: str  #: node | store | trainer | relay | rollout
    boot_id: str
    node: str
    pid: int


class ActorLeft(Event, frozen=True, kw_only=True):
    """A process has ended in good order; its last word, also after it has failed."""


class ActorFailed(Event, frozen=True, kw_only=True):
    """An actor cannot go on; `user_error` marks a mistake in config, data or model."""

    reason: str
    user_error: bool


# --- node -------------------------------------------------------------------------------------


class ProcessExited(Event, frozen=True, kw_only=True):
    """An actor's process is gone; `restarting` says whether its node starts it again."""

    actor: str
    boot_id: str
    code: int  #: exit status; -9 is SIGKILL
    restarting: bool


# --- store ------------------------------------------------------------------------------------


class DataLoaded(Event, frozen=True, kw_only=True):
    """The prompt pool is durable; rows are 0..num_train-1 and 0..num_eval-1."""

    num_train: int
    num_eval: int
    overlap: int  #: training rows left out because their prompt is held out
    digest: str


class EndedTrajectory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of `trajectories-ended`."""

    trajectory: TrajectoryId
    num_tokens: int  #: sampled tokens that the store holds for it
    tokens_lost: int  #: of earlier attempts, which were thrown away


class TrajectoriesEnded(Event, frozen=True, kw_only=True):
    """The store has written how these trajectories ended; it is the answer to a command."""

    command_id: int
    ended: tuple[EndedTrajectory, ...]


# --- trainer ----------------------------------------------------------------------------------


class TrainerReady(Event, frozen=True, kw_only=True):
    """The policy is loaded and its first slot is granted."""

    num_parameters: int
    weights_bytes: int


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a batch that were not trained: their engine had other weights than they name."""

    replica: str
    version: int
    diff: float  #: mean |log p(trainer) - log p(engine)| of their tokens, nats
    limit: float  #: what weights of their age may differ by; nats
    trajectories: tuple[TrajectoryId, ...]


class StepCompleted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The optimizer has consumed one batch and the trainer's own book has it on disk."""

    step: int  #: index from 0
    version: int  #: number of the weights that this step made
    changed: bool  #: false: the step had no signal and left the weights as they were
    reason: str  #: why not, else empty
    num_tokens: int
    digest: str  #: xxh3_128 of the ids of the batch, in order
    metrics: dict[str, float]
    left_out: tuple[LeftOut, ...] = ()


class PublishSkipped(Event, frozen=True, kw_only=True):
    """No slot was free in time: these weights are owed and the trainer went on."""

    version: int
    step: int
    reason: str


class ModelExported(Event, frozen=True, kw_only=True):
    """The export was written, loaded again, and its weights are on their way to the relay."""

    version: int
    path: str


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A version is on disk, whole and synced, for replicas of every machine."""

    version: int
    step: int
    path: str  #: of its directory, inside the run directory
    kept: tuple[int, ...]  #: versions whose checkpoints are there now, ascending


# --- relay ------------------------------------------------------------------------------------


class RelayReady(Event, frozen=True, kw_only=True):
    """The relay listens, for processes of its machine and for the relay before it."""

    address: str  #: host:port for the trainer and the replicas of its machine
    bulk: str  #: host:port to which another relay sends weights


class WeightsPublished(Event, frozen=True, kw_only=True):
    """The relay of the trainer's machine holds a complete, digested version."""

    version: int
    step: int
    digest: str  #: xxh3_128
    num_bytes: int
    held: tuple[int, ...]  #: versions that can be pulled now, ascending


class WeightsReceived(Event, frozen=True, kw_only=True):
    """A relay has a complete version from the relay before it, and its digest is right."""

    version: int
    step: int
    digest: str  #: xxh3_128, worked out over what arrived
    kind: str  #: full | delta
    num_bytes: int  #: on the wire
    duration_ms: int  #: from its first byte to the end of the digest
    held: tuple[int, ...]  #: versions that can be pulled now, ascending


class RelayLinked(Event, frozen=True, kw_only=True):
    """The connection to the successor stands (or was ended, for none); it answers one command."""

    command_id: int
    successor: str  #: name of the relay; empty: none


class TransferTrouble(Event, frozen=True, kw_only=True):
    """Something between two relays went wrong and was dealt with, or is being tried again."""

    kind: str  #: e.g. damaged-chunk, wrong-digest, refused, unreachable, stalled
    relay: str  #: the other one; empty if it never said who it is
    version: int  #: -1: of none
    detail: str


# --- rollout ----------------------------------------------------------------------------------


class ReplicaReady(Event, frozen=True, kw_only=True):
    """The engine can take work once it has weights."""

    max_num_seqs: int  #: trajectories that it takes at a time, running or waiting for a slot
    kv_capacity_tokens: int


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """The engine generates with this version: digest checked, probe within tolerance."""

    version: int
    step: int
    digest: str
    probe_diff: float  #: max |log p(engine) - log p(trainer)| over the probe
    seconds: float
    reloaded: bool  #: false: the digest was the one already loaded, only the stamp changed


class WeightsRejected(Event, frozen=True, kw_only=True):
    """Digest or probe failed after two loads: the replica does not serve with this version."""

    version: int
    reason: str


class VersionGone(Event, frozen=True, kw_only=True):
    """The relay no longer holds the version that was to be pulled."""

    version: int
    held: tuple[int, ...]


class CheckpointRefused(Event, frozen=True, kw_only=True):
    """The checkpoint that was to be loaded cannot be read, or is not what was trained."""

    version: int
    reason: str


class TrajectoryStarted(Event, frozen=True, kw_only=True):
    """The store opened the trajectory for this placement and the engine has it."""

    trajectory: TrajectoryId
    placement: int
    tokens_resumed: int


class TokenProgress(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A gauge of one replica: unsequenced, never resent, the last value wins.

    Sums are since its process started."""

    tokens_total: int  #: sampled
    kv_used_tokens: int
    running: int
    waiting: int
    kv_capacity_tokens: int = 0  #: 0: not said
    preempted: int = 0  #: sequences that gave their cache up to others and began again
    prefix_cache_queries: int = 0  #: tokens looked up in the prefix cache; 0 without one
    prefix_cache_hits: int = 0  #: tokens found there


class TrajectoryFinished(Event, frozen=True, kw_only=True):
    """The last token is sampled and the whole response is durable in the store."""

    trajectory: TrajectoryId
    placement: int
    num_tokens: int  #: sampled tokens, prompt excluded
    finish_reason: str  #: stop | length, as the engine said


class TrajectoryFailed(Event, frozen=True, kw_only=True):
    """This sibling cannot be trained (refused log-probs, unscored, reward worker lost)."""

    trajectory: TrajectoryId
    placement: int
    reason: str
    detail: str


class TrajectoryRewarded(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The reward is durable in the store; one that failed is `reward.error_score`."""

    trajectory: TrajectoryId
    placement: int
    score_bits: int  #: the float64 of the score as an unsigned integer
    correct: bool  #: score >= 1 and not truncated
    reason: str  #: ok | error | timeout | not-a-number | wrong-length
    num_tokens: int
    detail: str = ""  #: what went wrong; only of a replica's first failures, the store has all
    truncated: bool = False  #: the engine stopped at the length limit
    #: of a held-out answer: figures beside the score, by name
    extras: dict[str, float] = msgspec.field(default_factory=dict)


ALL_EVENTS: tuple[type[Event], ...] = (
    CoordinatorStarted,
    TimerFired,
    HeartbeatLost,
    NodeSilent,
    NodeHeard,
    DrainRequested,
    TrainingWarning,
    EventGivenUp,
    BatchProposed,
    ActorJoined,
    ActorLeft,
    ActorFailed,
    ProcessExited,
    DataLoaded,
    TrajectoriesEnded,
    TrainerReady,
    StepCompleted,
    PublishSkipped,
    ModelExported,
    CheckpointSaved,
    RelayReady,
    WeightsPublished,
    WeightsReceived,
    RelayLinked,
    TransferTrouble,
    ReplicaReady,
    WeightsLoaded,
    WeightsRejected,
    VersionGone,
    CheckpointRefused,
    TrajectoryStarted,
    TokenProgress,
    TrajectoryFinished,
    TrajectoryFailed,
    TrajectoryRewarded,
)
