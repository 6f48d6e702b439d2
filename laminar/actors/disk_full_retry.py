"""A full disk is waited for: what must be on it is written as soon as there is room.

Reads   what a write raised
Gives   DiskWait, one per kind of write: when to try again
Raises  DiskStayedFull after coordinator.disk_wait_s; at once, whatever else a write raised

It says when the waiting begins and when it is over, in the log and on the terminal. A disk that
fails otherwise than for want of room is not tried again: it is unknown what is on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from laminar.config import Config
from laminar.names.ports import no_room

PAUSE_S, PAUSE_MAX_S = 0.25, 5.0
QUIET_S = 10.0
"""A disk with little room takes one write and refuses the next: that is said this often at most."""

Written = TypeVar("Written")


class RetryHost(Protocol):
    """What is needed of an actor's host."""

    config: Config

    def now_ns(self) -> int:
        """The time of a clock that only goes forward."""

    def notify_user(self, text: str) -> None:
        """Say it in the log and on the terminal."""

    async def sleep_for(self, seconds: float) -> None:
        """Wait; raises (host.Ended) when this process is to end."""


class DiskStayedFull(OSError):
    """There was no room for too long."""


class DiskFullRetry:
    """The state of one kind of write: has room, or waits for it since a while."""

    def __init__(self, owner: RetryHost, what: str) -> None:
        """`what` is written, for people."""
        self._owner, self._what = owner, what
        self._limit_s = owner.config.coordinator.disk_wait_s
        self._since_s: float | None = None
        self._told_s: float | None = None  #: when the beginning of a wait was announced last
        self._told = False
        self._pause_s = PAUSE_S

    def handle_failure(self, error: Exception) -> float:
        """Seconds until the next try; raises when there is to be none."""
        if not no_room(error):
            raise error
        now = self._now_s()
        if self._since_s is None:
            self._since_s, self._pause_s = now, PAUSE_S
            self._announce_wait(now, error)
        if now - self._since_s >= self._limit_s:
            over = DiskStayedFull(
                f"{self._what} could not be written for {self._limit_s:g} s "
                f"(coordinator.disk_wait_s), the disk is full: {error}"
            )
            self._owner.notify_user(str(over))  # the coordinator may not be there to hear it
            raise over from error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
        return min(pause_s, self._since_s + self._limit_s - now)

    def record_success(self) -> None:
        """A write came through."""
        if self._since_s is not None:
            waited_s, self._since_s = self._now_s() - self._since_s, None
            if self._told:
                self._owner.notify_user(
                    f"{self._what}: there is room again, after {waited_s:.1f} s"
                )

    def _now_s(self) -> float:
        return self._owner.now_ns() / 1e9

    def _announce_wait(self, now: float, error: Exception) -> None:
        self._told = self._told_s is None or now - self._told_s >= QUIET_S
        if self._told:
            self._told_s = now
            self._owner.notify_user(
                f"{self._what} cannot be written, the disk is full ({error}): waiting at most "
                f"{self._limit_s:g} s for room (coordinator.disk_wait_s)"
            )

    async def until_room(self, write: Callable[[], Awaitable[Written]]) -> Written:
        """Try `write`, which leaves nothing half done, until it comes through."""
        while True:
            try:
                written = await write()
            except Exception as error:
                pause_s = self.handle_failure(error)
            else:
                self.record_success()
                return written
            await self._owner.sleep_for(pause_s)
