"""Failures of a run: the kind, the subject, and the event at which each was decided.

Reads   nothing
Gives   FailureKind, the table of kinds; Failure

Exit codes, messages, the summary and docs/states.md follow from the table. Checks and programs read
kind, subject and cause; `detail` is for people only. No event carries a failure (as in
events/reasons.py): it follows from the events, or from the end of a process.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from laminar.names import exit_codes


class KindRecord(NamedTuple):
    """The facts about a kind of failure."""

    meaning: str
    remedy: str
    sentence: str = "{detail}"  #: form of the message
    exit_code: int = exit_codes.FAILED
    resumable: bool = False  #: whether a run with checkpoints stays open, to be resumed
    loss: bool = False  #: whether a pausing run pauses instead: its machines leave for one reason


_LOGS = "read the log of the process, then fork the run"
_RESUME = "resume the run"
_START = "start a new run"
_CODE = "correct your code, then fork the run"


class FailureKind(StrEnum):
    """The kind of failure that ended the run or its coordinator."""

    record: KindRecord

    def __new__(cls, name: str, record: KindRecord) -> FailureKind:
        kind = str.__new__(cls, name)
        kind._value_, kind.record = name, record
        return kind

    # fmt: off
    STOPPED = "stopped", KindRecord(
        "ended at once on request", _RESUME, "stopped at once: {subject}",
        exit_codes.STOPPED_EARLY, resumable=True)
    CRASHED = "crashed", KindRecord(
        "coordinator died", _RESUME, exit_code=exit_codes.CRASHED, resumable=True)
    STOPPED_EARLY = "stopped-early", KindRecord(
        "never began", _START, "stopped before it began: {subject}", exit_codes.STOPPED_EARLY)
    USER_MISTAKE = "user-mistake", KindRecord(
        "mistake in settings or files", "correct the mistake, then resume the run",
        exit_code=exit_codes.USER_ERROR, resumable=True)
    DISK_FAILED = "disk-failed", KindRecord(
        "event log cannot be written", "make room, then resume the run",
        "the disk of the run fails: {detail}", exit_codes.LOG_UNWRITABLE, resumable=True)
    NOT_HANDLED = "not-handled", KindRecord(
        "core raised on an event", "resume the run with a fixed build", resumable=True)
    STALLED = "stalled", KindRecord(
        "nothing moved, also after a restart",
        "read `logs/latest/PROCESS.stacks`, then resume the run",
        "{subject} holds the run up: {detail}", resumable=True)
    NON_FINITE = "non-finite", KindRecord(
        "`trainer.max_nonfinite_updates` reached", "fork an earlier step or resume", resumable=True)
    NEVER_JOINED = "never-joined", KindRecord(
        "process ended before it joined", _LOGS, "{subject} never joined: {detail}", loss=True)
    PROCESS_FAILED = "process-failed", KindRecord("process cannot continue", _LOGS)
    PROCESS_LOST = "process-lost", KindRecord(
        "process lost, not restarted", _LOGS, "{subject} is lost: {detail}", loss=True)
    STORE_LOST = "store-lost", KindRecord(
        "store lost", _LOGS, "the store is lost: {detail}", loss=True)
    TRAINER_LOST = "trainer-lost", KindRecord("trainer lost", _LOGS, loss=True)
    RELAY_LOST = "relay-lost", KindRecord(
        "trainer's relay lost", _LOGS, "the trainer's machine has no relay: {detail}", loss=True)
    REPLICAS_LOST = "replicas-lost", KindRecord(
        "last replica lost", _LOGS, "no replica is left: {detail}", loss=True)
    OVERDUE = "overdue", KindRecord(
        "command timed out", _LOGS, "{subject} did not finish {detail} in time")
    NOT_PUBLISHED = "not-published", KindRecord(
        "new weights timed out", _LOGS, "the relay did not publish the weights of step {detail}")
    BATCH_FATAL = "batch-fatal", KindRecord("batch ended too many trainers", _LOGS)
    EXPORT_DIFFERS = "export-differs", KindRecord(
        "export has other weights", _LOGS, "the export reads back with digest {detail}")
    ENV_FAILS = "env-fails", KindRecord("environment loses calls", _CODE)
    REWARD_FAILS = "reward-fails", KindRecord("`reward.max_error_share` exceeded", _CODE)
    NO_SCORES = "no-scores", KindRecord("reward gave no score", _CODE)
    NO_VARIANCE = "no-variance", KindRecord(
        "`algorithm.filter_groups` drops all", "fork the run with other prompts")
    ENGINE_FAILS = "engine-fails", KindRecord(
        "engine failed alike at two starts", "correct the rollout settings, then start a new run",
        "{subject}: its engine failed the same way at two starts: {detail}")
    NOT_STARTED = "not-started", KindRecord(
        "roles missing at the start timeout", _START,
        "not started within {detail}: missing {subject}", loss=True)
    NO_CHECKPOINT = "no-checkpoint", KindRecord(
        "trainer found no checkpoint", _START,
        "{subject} found no checkpoint that the log confirms, although one was saved")
    # fmt: on


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The failure of a run."""

    kind: FailureKind
    subject: str
    cause: int = 0  #: event at which it was decided; 0: it is not in the log
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The failure in a sentence, for people."""
        return self.kind.record.sentence.format(subject=self.subject, detail=self.detail)
