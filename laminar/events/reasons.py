"""REASONS: the closed sets of words that events and commands carry, each one enumeration.

Reads   nothing
Gives   EndKind, DropReason, FailureReason, RewardOutcome, FinishReason, EndedBy, PullPurpose,
        TransferForm

Each is its text on the wire and in the log. Reasons that only people read (why an actor failed,
what went wrong between two relays) are free text.
"""

from __future__ import annotations

from enum import StrEnum


class EndKind(StrEnum):
    """The end of a trajectory or a group; NONE: not yet."""

    NONE = ""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    DROPPED = "dropped"


class FailureReason(StrEnum):
    """A replica's reason to give up a trajectory."""

    STORE_REFUSED = "store-refused"  #: the tokens or the reward can never be stored
    UNSCORED = "unscored"  #: the reward function does not apply to it
    REWARD_WORKER_LOST = "reward-worker-lost"
    ENV_LOST = "env-lost"  #: session of its environment is gone, and its actions are not repeated
    ENV_FAILED = "env-failed"  #: environment failure that the policy cannot cause


class DropReason(StrEnum):
    """The reason not to train a trajectory or a group; NONE: it is trained, or has not ended."""

    NONE = ""
    BATCH_TIMEOUT = "batch-timeout"  #: the trainer waited for it too often
    END_OF_DATA = "end-of-data"  #: too little is left for a batch
    MISMATCH = "mismatch"  #: left out by the trainer: the engine had other weights than named
    NO_VARIANCE = "no-variance"  #: no two scored siblings differ (algorithm.filter_groups)
    QUARANTINED = "quarantined"  #: replicas died repeatedly while they ran it
    REPLICA_LOST = "replica-lost"  #: an evaluation sample, which is generated again
    RESTARTED = "restarted"  #: tokens of an attempt that began again
    RUN_ENDED = "run-ended"
    TOO_FEW_SCORED = "too-few-scored"  #: too few siblings of its group
    VERSION_MISSING = "version-missing"  #: no process can load the weights of an evaluation sample
    #: given up by its replica (FailureReason)
    STORE_REFUSED = "store-refused"
    UNSCORED = "unscored"
    REWARD_WORKER_LOST = "reward-worker-lost"
    ENV_LOST = "env-lost"
    ENV_FAILED = "env-failed"


class RewardOutcome(StrEnum):
    """Result of an attempt to score: a score, or why it is `reward.error_score`."""

    OK = "ok"
    ERROR = "error"  #: the function raised
    TIMEOUT = "timeout"
    NOT_A_NUMBER = "not-a-number"
    WRONG_LENGTH = "wrong-length"  #: number of scores differs from the number of responses


class FinishReason(StrEnum):
    """The reason why generation ended, as reported by the engine."""

    STOP = "stop"  #: the last token is one of the stop ids
    LENGTH = "length"  #: the limit of new tokens


class EndedBy(StrEnum):
    """The reason to end a trajectory whose last turn asked for more; NONE: no such end."""

    NONE = ""
    MAX_TURNS = "max-turns"
    CONTEXT_FULL = "context-full"  #: the tool results do not fit
    TOOL_TIMEOUT = "tool-timeout"  #: one call exceeded its limit
    TURN_TIMEOUT = "turn-timeout"  #: the calls of one turn together exceeded theirs
    TRAJECTORY_TIMEOUT = "trajectory-timeout"  #: the calls of all turns exceeded theirs


class PullPurpose(StrEnum):
    """The reason for an order to load weights."""

    START = "start"
    NEWER = "newer"
    EVALUATION = "evaluation"
    RESUME = "resume"  #: for lost work of that version
    IN_FLIGHT = "in-flight"  #: newer weights, with which running trajectories continue
    STREAM = "stream"  #: the newest, while the relay receives them; work is placed there at once


class TransferForm(StrEnum):
    """The form in which a version travelled between two relays."""

    FULL = "full"
    DELTA = "delta"
