"""Why a run has failed: what kind of failure it is, of what, and at which event it was decided.

Reads   nothing
Gives   FailureKind, Failure; the sentence for people follows from a Failure

A check or a program asks for kind, subject and cause; `detail` is what only a person reads. This is
no file of events (events/reasons.py): no event carries a failure, it follows from them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailureKind(StrEnum):
    """What ended the run; what its subject is stands beside each."""

    STOPPED = "stopped"  #: by the user, at once; `run`
    STOPPED_EARLY = "stopped-early"  #: before it began; `run`
    NOT_STARTED = "not-started"  #: the time of the start is over; the roles that are missing
    NEVER_JOINED = "never-joined"  #: a process ended before it had joined; its name
    PROCESS_FAILED = "process-failed"  #: it says that it cannot go on; its name
    ENGINE_FAILS = "engine-fails"  #: in the same way at two starts; the replica
    #: it is lost, and nobody starts it again; its name
    PROCESS_LOST = "process-lost"
    STORE_LOST = "store-lost"
    TRAINER_LOST = "trainer-lost"
    RELAY_LOST = "relay-lost"
    REPLICAS_LOST = "replicas-lost"  #: the last one
    OVERDUE = "overdue"  #: a command was not done in time; the process that it was for
    NOT_PUBLISHED = "not-published"  #: new weights did not come in time; the trainer's relay
    EXPORT_DIFFERS = "export-differs"  #: it is not what was trained; the relay that has it
    BATCH_DEADLY = "batch-deadly"  #: one batch has ended so many trainers; the last one's name
    NO_CHECKPOINT = "no-checkpoint"  #: a trainer that comes back finds none; its name
    REWARD_FAILS = "reward-fails"  #: on more answers than reward.max_error_share; `reward`
    NO_SCORES = "no-scores"  #: the reward function gives none; `reward`
    ENV_FAILS = "env-fails"  #: on a fifth of its calls; `environment`
    NO_VARIANCE = "no-variance"  #: whole batches of groups of equal answers, in a row; `data`


_SENTENCES = {
    FailureKind.STOPPED: "stopped at once: {detail}",
    FailureKind.STOPPED_EARLY: "stopped before it began: {detail}",
    FailureKind.NOT_STARTED: "not started within {detail}: missing {subject}",
    FailureKind.NEVER_JOINED: "{subject} never joined: {detail}",
    FailureKind.PROCESS_FAILED: "{subject}: {detail}",
    FailureKind.ENGINE_FAILS: "{subject}: its engine has failed in the same way at two starts: "
    "{detail}",
    FailureKind.PROCESS_LOST: "{subject} is lost: {detail}",
    FailureKind.STORE_LOST: "the store is lost: {detail}",
    FailureKind.RELAY_LOST: "the trainer's machine has no relay: {detail}",
    FailureKind.REPLICAS_LOST: "no replica is left: {detail}",
    FailureKind.OVERDUE: "{subject} did not finish {detail} in time",
    FailureKind.NOT_PUBLISHED: "the relay did not publish the weights of step {detail}",
    FailureKind.EXPORT_DIFFERS: "the export read back has digest {detail}",
    FailureKind.NO_CHECKPOINT: (
        "{subject} has found no checkpoint that the log confirms, and there was one"
    ),
}
"""Of the other kinds the detail is the whole sentence."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The failure of a run."""

    kind: FailureKind
    subject: str
    cause: int  #: the event at which it was decided
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The failure in a sentence, for people."""
        form = _SENTENCES.get(self.kind, "{detail}")
        return form.format(subject=self.subject, detail=self.detail)
