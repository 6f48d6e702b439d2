"""Retries for a disk that is full or fails: a required write is repeated until it succeeds.

Reads   exceptions of a write
Gives   DiskFullRetry, one per kind of write: when to retry
Raises  DiskStayedFull after coordinator.disk_full_timeout_s; any other exception of a write at once

The start and the end of a wait are announced in the log and on the terminal. A file server that
restarts fails for seconds (ports.is_transient); damage of a file is not retried.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from laminar.config import Config
from laminar.names.ports import is_transient, no_room

PAUSE_S, PAUSE_MAX_S = 0.25, 5.0
QUIET_S = 10.0
"""Minimum time between announcements; a nearly full disk alternates between success and failure."""

Written = TypeVar("Written")


class RetryHost(Protocol):
    """The part of an actor's host that the retries need."""

    config: Config

    def now_ns(self) -> int:
        """Return the time of a monotonic clock."""

    def notify_user(self, text: str) -> None:
        """Show a message in the log and on the terminal."""

    def count_work(self) -> None:
        """Count an attempt as work: this wait has its own limit."""

    async def sleep_for(self, seconds: float) -> None:
        """Wait; raise host.ProcessEnding when this process is to end."""


class DiskStayedFull(OSError):
    """The disk was full, or failed, for longer than coordinator.disk_full_timeout_s."""


class DiskFullRetry:
    """The state of one kind of write: working, or waiting for space since some time."""

    def __init__(self, owner: RetryHost, what: str, doing: str = "written") -> None:
        """Start in the working state; `what` is written, or `doing`, in words for messages."""
        self._owner, self._what, self._doing = owner, what, doing
        self._limit_s = owner.config.coordinator.disk_full_timeout_s
        self._since_s: float | None = None
        self._told_s: float | None = None  #: when the start of a wait was last announced
        self._told = False
        self._pause_s = PAUSE_S
        self.full = False  #: whether the last failure was for lack of space

    def handle_failure(self, error: Exception) -> float:
        """Return the seconds until the next try; raise if there should be none."""
        if not is_transient(error):
            raise error
        self.full = no_room(error)
        now = self._now_s()
        if self._since_s is None:
            self._since_s, self._pause_s = now, PAUSE_S
            self._announce_wait(now, error)
        if now - self._since_s >= self._limit_s:
            over = DiskStayedFull(
                f"{self._what} could not be {self._doing} for {self._limit_s:g} s "
                f"(coordinator.disk_full_timeout_s), {self._state}: {error}"
            )
            self._owner.notify_user(str(over))  # the coordinator may be unable to receive it
            raise over from error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
        return min(pause_s, self._since_s + self._limit_s - now)

    def record_success(self) -> None:
        """Record that a write succeeded, which ends a wait."""
        if self._since_s is not None:
            waited_s, self._since_s = self._now_s() - self._since_s, None
            if self._told:
                self._owner.notify_user(
                    f"{self._what}: {'there is free space' if self.full else 'the disk works'} "
                    f"again, after {waited_s:.1f} s"
                )

    @property
    def _state(self) -> str:
        return "the disk is full" if self.full else "the disk fails"

    def _now_s(self) -> float:
        return self._owner.now_ns() / 1e9

    def _announce_wait(self, now: float, error: Exception) -> None:
        self._told = self._told_s is None or now - self._told_s >= QUIET_S
        if self._told:
            self._told_s = now
            self._owner.notify_user(
                f"{self._what} cannot be {self._doing}, {self._state} ({error}): waiting at most "
                f"{self._limit_s:g} s (coordinator.disk_full_timeout_s)"
            )

    async def until_room(self, write: Callable[[], Awaitable[Written]]) -> Written:
        """Repeat `write`, which must leave nothing half done, until it succeeds."""
        while True:
            self._owner.count_work()
            try:
                written = await write()
            except Exception as error:
                pause_s = self.handle_failure(error)
            else:
                self.record_success()
                return written
            await self._owner.sleep_for(pause_s)
