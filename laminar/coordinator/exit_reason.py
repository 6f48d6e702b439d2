"""Failures for the exceptions that end a coordinator.

Reads   the exception
Gives   find_failure

Pure, so that the simulator's coordinator ends as the real one does.
"""

from __future__ import annotations

from laminar.config import ConfigError
from laminar.coordinator.tick import HandlingFailed
from laminar.core.rules import LogicError
from laminar.core.state.failures import Failure, FailureKind
from laminar.eventlog.record import LogRefused
from laminar.eventlog.writer import LogGrew, LogTaken
from laminar.events.base import COORDINATOR
from laminar.names.ports import DiskError, find_transient


class ReplayDiffers(RuntimeError):
    """The replay of the log gives other decisions than it records."""


FINAL_ERRORS = (ConfigError, LogRefused, LogTaken, LogicError, ReplayDiffers)
"""Errors that would end a restarted coordinator in the same way, except LogGrew."""


def find_failure(error: BaseException) -> Failure:
    """Return the failure of a coordinator that this exception ended."""
    transient, text = find_transient(error), str(error)
    if isinstance(error, LogGrew):
        kind = FailureKind.CRASHED
    elif transient is not None or isinstance(error, DiskError):
        kind = FailureKind.DISK_FAILED
        text = text if isinstance(error, (*FINAL_ERRORS, DiskError)) else str(transient)
    elif isinstance(error, FINAL_ERRORS):
        kind = FailureKind.USER_MISTAKE
    elif isinstance(error, HandlingFailed):
        kind = FailureKind.NOT_HANDLED
    else:
        kind, text = (
            FailureKind.CRASHED,
            f"the coordinator crashed: {type(error).__name__}: {error}",
        )
    return Failure(kind, COORDINATOR, detail=text)
