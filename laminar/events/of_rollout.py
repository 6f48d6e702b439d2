"""Events that rollout replicas report.

Reads   nothing
Gives   one frozen struct per event, each declared with the commands that it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, ends_commands
from laminar.events.reasons import EndedBy, FailureReason, FinishReason, RewardOutcome
from laminar.names.ids import TrajectoryId


class ReplicaReady(Event, frozen=True, kw_only=True):
    """The engine can take work once it has weights."""

    max_num_seqs: int  #: trajectories that it takes at a time, running or waiting for a slot
    kv_capacity_tokens: int
    #: largest number of sequences whose decode step meets the latency budget (B); 0: unknown
    max_batch: int = 0


@ends_commands(cmd.PullWeights)
class WeightsLoaded(Event, frozen=True, kw_only=True):
    """The engine generates with this version: digest checked, probe within tolerance."""

    version: int
    step: int
    digest: str
    probe_diff: float  #: max |log p(engine) - log p(trainer)| over the probe
    seconds: float
    reloaded: bool  #: false: the digest was already loaded, only the version number changed
    num_bytes: int = 0  #: size of the version
    probe_kl: float | None = None  #: estimated KL(engine, trainer) over the probe, nats per token


@ends_commands(cmd.PullWeights)
class WeightsRejected(Event, frozen=True, kw_only=True):
    """Digest or probe failed after two loads: the replica does not serve this version."""

    version: int
    reason: str


@ends_commands(cmd.PullWeights)
class VersionMissing(Event, frozen=True, kw_only=True):
    """The relay no longer holds the version that was to be pulled."""

    version: int
    held: tuple[int, ...]


@ends_commands(cmd.PullWeights)
class CheckpointRefused(Event, frozen=True, kw_only=True):
    """The checkpoint that was to be loaded cannot be read, or differs from the trained weights."""

    version: int
    reason: str


class TrajectoryStarted(Event, frozen=True, kw_only=True):
    """The store opened the trajectory for this placement and the engine has it."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    placement: int
    tokens_resumed: int
    prompt_tokens: int = 0  #: 0: unknown


class TokenProgress(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A gauge of one replica: unsequenced, never resent, the last value wins.

    Totals count from the start of its process."""

    tokens_total: int  #: sampled
    kv_used_tokens: int
    running: int
    waiting: int
    kv_capacity_tokens: int = 0  #: 0: unknown
    preempted: int = 0  #: sequences that were evicted from the KV cache and began again
    prefix_cache_queries: int = 0  #: tokens looked up in the prefix cache; 0 without one
    prefix_cache_hits: int = 0  #: tokens found there
    max_batch: int = 0  #: as in replica-ready, measured since; 0: unknown
    #: highest id of a command to generate such that the engine has it and all before it
    as_of: int = 0
    #: sampled tokens of each trajectory here; only while none waits and few run
    lengths: dict[TrajectoryId, int] = msgspec.field(default_factory=dict)


@ends_commands(cmd.GenerateTrajectory)
class TrajectoryFinished(Event, frozen=True, kw_only=True):
    """The last token is sampled and the whole response is durable in the store."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    placement: int
    num_tokens: int  #: sampled tokens, prompt excluded
    finish_reason: FinishReason


@ends_commands(cmd.ReleaseTrajectories)
class TrajectoriesReleased(Event, frozen=True, kw_only=True):
    """The trajectories of the command no longer run here, and the store has all their tokens."""

    command_id: int


@ends_commands(cmd.GenerateTrajectory, cmd.StartSession, cmd.ScoreTrajectories)
class TrajectoryFailed(Event, frozen=True, kw_only=True):
    """A trajectory cannot be trained (refused log-probs, unscored, reward worker lost)."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    placement: int
    reason: FailureReason
    detail: str


@ends_commands(cmd.ScoreTrajectories)
class TrajectoryRewarded(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The reward is durable in the store; a failed one is `reward.error_score`."""

    trajectory_id: TrajectoryId = msgspec.field(name="trajectory")
    placement: int
    reward_bits: int  #: the float64 of the score as an unsigned integer
    correct: bool  #: score >= 1 and not truncated
    reason: RewardOutcome
    num_tokens: int
    detail: str = ""  #: error text; only for a replica's first failures, the store has all
    truncated: bool = False  #: whether the engine stopped at the length limit, or `ended_by` is set
    ended_by: EndedBy = EndedBy.NONE
    #: further figures of an evaluation sample, by name
    extras: dict[str, float] = msgspec.field(default_factory=dict)
