"""Failures of a run: the kind, the subject, and the event at which each was decided.

Reads   nothing
Gives   FailureKind, Failure; the sentence for people follows from a Failure

Checks and programs read kind, subject and cause; `detail` is for people only. No event carries a
failure (as in events/reasons.py): it follows from the events.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailureKind(StrEnum):
    """The kind of failure that ended the run, with its subject after the semicolon."""

    STOPPED = "stopped"  #: by the user, at once; `run`
    STOPPED_EARLY = "stopped-early"  #: by the user, before it began; `run`
    NOT_STARTED = "not-started"  #: start timeout; the missing roles
    NEVER_JOINED = "never-joined"  #: a process ended before it had joined; its name
    PROCESS_FAILED = "process-failed"  #: process that reports that it cannot continue; its name
    ENGINE_FAILS = "engine-fails"  #: engine that failed in the same way at two starts; the replica
    #: process that is lost and not restarted; its name
    PROCESS_LOST = "process-lost"
    STORE_LOST = "store-lost"
    TRAINER_LOST = "trainer-lost"
    RELAY_LOST = "relay-lost"
    REPLICAS_LOST = "replicas-lost"  #: last replica lost; its name
    OVERDUE = "overdue"  #: command that missed its deadline; the process that it was for
    NOT_PUBLISHED = "not-published"  #: new weights that did not arrive in time; the trainer's relay
    EXPORT_DIFFERS = "export-differs"  #: export with other weights; the relay that has it
    BATCH_FATAL = "batch-fatal"  #: batch that has ended too many trainers; the last one's name
    NO_CHECKPOINT = "no-checkpoint"  #: returning trainer without a checkpoint; its name
    REWARD_FAILS = "reward-fails"  #: more failed responses than reward.max_error_share; `reward`
    NO_SCORES = "no-scores"  #: reward function without any score; `reward`
    ENV_FAILS = "env-fails"  #: environment with a fifth of its calls failed; `environment`
    NON_FINITE = "non-finite"  #: gradients that are not finite, in a row; `gradient`
    NO_VARIANCE = "no-variance"  #: batches of groups of equal responses, in a row; `data`


_SENTENCES = {
    FailureKind.STOPPED: "stopped at once: {detail}",
    FailureKind.STOPPED_EARLY: "stopped before it began: {detail}",
    FailureKind.NOT_STARTED: "not started within {detail}: missing {subject}",
    FailureKind.NEVER_JOINED: "{subject} never joined: {detail}",
    FailureKind.PROCESS_FAILED: "{subject}: {detail}",
    FailureKind.ENGINE_FAILS: "{subject}: its engine failed the same way at two starts: {detail}",
    FailureKind.PROCESS_LOST: "{subject} is lost: {detail}",
    FailureKind.STORE_LOST: "the store is lost: {detail}",
    FailureKind.RELAY_LOST: "the trainer's machine has no relay: {detail}",
    FailureKind.REPLICAS_LOST: "no replica is left: {detail}",
    FailureKind.OVERDUE: "{subject} did not finish {detail} in time",
    FailureKind.NOT_PUBLISHED: "the relay did not publish the weights of step {detail}",
    FailureKind.EXPORT_DIFFERS: "the export reads back with digest {detail}",
    FailureKind.NO_CHECKPOINT: (
        "{subject} found no checkpoint that the log confirms, although one was saved"
    ),
}
"""The sentences by kind; for the other kinds the detail is the whole sentence."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The failure of a run."""

    kind: FailureKind
    subject: str
    cause: int  #: event at which it was decided
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The failure in a sentence, for people."""
        form = _SENTENCES.get(self.kind, "{detail}")
        return form.format(subject=self.subject, detail=self.detail)
