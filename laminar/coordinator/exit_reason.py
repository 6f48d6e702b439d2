"""Exit codes and messages for the exceptions that end a coordinator.

Reads   the exception
Gives   the exit code, and the sentence for the user

Pure, so that the simulator's coordinator ends as the real one does.
"""

from __future__ import annotations

from laminar.config import ConfigError
from laminar.coordinator.tick import HandlingFailed
from laminar.core.rules import LogicError
from laminar.eventlog.record import LogRefused
from laminar.eventlog.writer import LogGrew, LogTaken
from laminar.names import exit_codes
from laminar.names.ports import DiskError, find_transient


class ReplayDiffers(RuntimeError):
    """The replay of the log gives other decisions than it records."""


FINAL_ERRORS = (ConfigError, LogRefused, LogTaken, LogicError, ReplayDiffers)
"""Errors that would end a restarted coordinator in the same way, except LogGrew."""


def get_exit_code(error: BaseException) -> int:
    """Return the exit code of a coordinator that this exception ended."""
    if isinstance(error, LogGrew):
        return exit_codes.CRASHED
    if find_transient(error) is not None:
        return exit_codes.LOG_UNWRITABLE
    if isinstance(error, FINAL_ERRORS):
        return exit_codes.USER_ERROR
    if isinstance(error, HandlingFailed):
        return exit_codes.FAILED
    return exit_codes.LOG_UNWRITABLE if isinstance(error, DiskError) else exit_codes.CRASHED


def describe_error(error: BaseException) -> str:
    """Describe the error for the terminal and the log."""
    if isinstance(error, (*FINAL_ERRORS, HandlingFailed)):
        return str(error)
    if isinstance(error, DiskError):
        return f"the event log cannot be written: {error}"
    if (failed := find_transient(error)) is not None:
        return f"the disk fails: {failed}"
    return f"the coordinator crashed: {type(error).__name__}: {error}"
