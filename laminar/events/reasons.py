"""WHY: the closed sets of words that events and commands carry; each is one enumeration.

Reads   nothing
Gives   End, DropReason, FailureReason, RewardOutcome, FinishReason, EndedBy, PullPurpose,
        TransferForm

On the wire and in the log each is its text. What only a person reads (why an actor failed, what
went wrong between two relays) is text.
"""

from __future__ import annotations

from enum import StrEnum


class EndKind(StrEnum):
    """How a trajectory or a group ended; NONE: not yet."""

    NONE = ""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    DROPPED = "dropped"


class FailureReason(StrEnum):
    """Why a replica gives a trajectory up."""

    STORE_REFUSED = "store-refused"  #: the tokens or the reward can never be stored
    UNSCORED = "unscored"  #: the reward function does not apply to it
    REWARD_WORKER_LOST = "reward-worker-lost"
    ENV_LOST = "env-lost"  #: its environment's session is gone, and what it did is not repeated
    ENV_FAILED = "env-failed"  #: its environment failed in a way that the policy cannot cause


class DropReason(StrEnum):
    """Why a trajectory or a group is not trained; NONE: it is, or has not ended."""

    NONE = ""
    BATCH_WAIT = "batch-wait"  #: the trainer waited for it too often
    END_OF_DATA = "end-of-data"  #: too little is left for a batch
    MISMATCH = "mismatch"  #: the trainer left it out: its engine had other weights than it named
    NO_VARIANCE = "no-variance"  #: no two scored siblings differ (algorithm.filter_groups)
    QUARANTINED = "quarantined"  #: replicas died while they ran it, time after time
    REPLICA_LOST = "replica-lost"  #: a held-out answer, which runs again whole
    RESTARTED = "restarted"  #: tokens of an attempt that began again
    RUN_ENDED = "run-ended"
    TOO_FEW_SCORED = "too-few-scored"  #: of its group
    VERSION_GONE = "version-gone"  #: of a held-out answer: nobody can load its weights any more
    #: given up by its replica (FailureReason)
    STORE_REFUSED = "store-refused"
    UNSCORED = "unscored"
    REWARD_WORKER_LOST = "reward-worker-lost"
    ENV_LOST = "env-lost"
    ENV_FAILED = "env-failed"


class RewardOutcome(StrEnum):
    """What became of an attempt to score: a score, or why it is `reward.error_score`."""

    OK = "ok"
    ERROR = "error"  #: the function raised
    TIMEOUT = "timeout"
    NOT_A_NUMBER = "not-a-number"
    WRONG_LENGTH = "wrong-length"  #: another number of scores than of answers


class FinishReason(StrEnum):
    """Why generation ended, as the engine said."""

    STOP = "stop"  #: the last token is one of the stop ids
    LENGTH = "length"  #: the limit of new tokens


class EndedBy(StrEnum):
    """Why an environment ended a trajectory whose last turn asked for more; NONE: it did not."""

    NONE = ""
    MAX_TURNS = "max-turns"
    CONTEXT_FULL = "context-full"  #: what the tools answered does not fit
    TOOL_TIMEOUT = "tool-timeout"  #: one call took too long
    TURN_TIMEOUT = "turn-timeout"  #: the calls of one turn together did
    TRAJECTORY_TIMEOUT = "trajectory-timeout"  #: those of all turns did


class PullPurpose(StrEnum):
    """Why a replica is told to load weights."""

    START = "start"
    NEWER = "newer"
    EVALUATION = "evaluation"
    RESUME = "resume"  #: for lost work of that version
    IN_FLIGHT = "in-flight"  #: newer ones, with which what runs there goes on
    STREAM = "stream"  #: the newest, while its relay gets them; work is placed there at once


class TransferForm(StrEnum):
    """The form in which a version travelled between two relays."""

    FULL = "full"
    DELTA = "delta"
