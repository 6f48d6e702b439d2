"""Ports: how pure code reaches the files of one directory and runs background work.

Time and frames are passed in as arguments. The coordinator's tick, the event log and the session
layer see only these protocols. `coordinator/system.py` and `coordinator/background.py` hold the
real implementations; a simulator has its own. A Disk is one directory of append-only files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Protocol

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SERVER_RESTARTS = (errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES)
_TRANSIENT = (*_NO_ROOM, *_SERVER_RESTARTS, errno.EMFILE, errno.ENFILE)
"""A full disk, the errors of a file server that restarts, and a lack of descriptors."""


class DiskError(OSError):
    """A write or sync failed. The process must end: a retried sync may lie about lost pages."""


class DiskFull(DiskError):
    """A write or sync failed for lack of room: optional data may be left out."""


class DatabaseHeld(RuntimeError):
    """Another process has the store's database, and may be writing: retry when it has ended."""


def no_room(error: BaseException) -> bool:
    """Return whether the disk, or a quota on it, is full."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def is_transient(error: BaseException) -> bool:
    """Return whether the error of a disk may end by itself.

    A retry has to write all the data again: a sync that succeeds after one that failed proves
    nothing about data that was written before."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def find_transient(error: BaseException | None) -> BaseException | None:
    """Return the transient error of a disk that led to this error, if there is one."""
    while error is not None and not is_transient(error):
        error = error.__cause__ or error.__context__
    return error


class AppendFile(Protocol):
    """An open file that only grows."""

    def append(self, data: bytes) -> None:
        """Write all of `data` at the end (short writes are continued); raises DiskError."""
        ...

    def sync(self) -> None:
        """Make everything appended so far durable (fdatasync); raises DiskError."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """The files of one directory, by name."""

    def list_names(self) -> list[str]:
        """Return the file names, sorted."""
        ...

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """Return bytes [offset, offset + size) of a file; size -1 reads to the end."""
        ...

    def get_size(self, name: str) -> int: ...

    def create_file(self, name: str) -> AppendFile:
        """Create a file (O_EXCL: FileExistsError if it exists) and sync its directory entry."""
        ...

    def sync(self, name: str) -> None:
        """Make the content of a file durable, also if another process wrote it; raise DiskError."""
        ...

    def replace_file(self, old: str, new: str) -> None:
        """Rename `old` to `new`, replacing an existing file, durable on return; raise DiskError.

        A crash leaves either the old or the new file under `new`, never a mixture."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file, durable on return; raises DiskError."""
        ...


class Background(Protocol):
    """Work on a state so large that the coordinator's ticks must not wait for it."""

    def can_run_inline(self, size: int) -> bool:
        """Return whether work on `size` trajectories is done at once, before `run` returns."""
        ...

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        """Run `work` on the state as it is now and pass its result to `done`.

        `collect_results` calls `done`, unless the work ran inline. A failure passes None and is
        counted and logged under `what`."""
        ...

    def collect_results(self) -> None:
        """Deliver the results that have arrived since the last call."""
        ...


class InlineBackground:
    """A Background that does all work before `run` returns; exceptions of the work propagate."""

    def can_run_inline(self, size: int) -> bool:
        return True

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        done(work())

    def collect_results(self) -> None:
        """Do nothing: all work is complete when `run` returns."""
