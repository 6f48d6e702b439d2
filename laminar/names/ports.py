"""What pure code may ask of the world: the files of one directory, and work beside its own turns.
Time and frames are handed in.

The coordinator's tick, the event log and the session layer see only these protocols.
`coordinator/system.py` and `coordinator/background.py` hold the real ones; a simulator holds
others. A Disk is one directory of append-only files.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Protocol

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskError(OSError):
    """A write or sync failed. The process must end: a retried sync may lie about lost pages."""


class DiskFull(DiskError):
    """The same, because there was no room: what can be done without may be left out."""


class DatabaseHeld(RuntimeError):
    """Another process has the store's database, and may be writing: try again when it has ended."""


def no_room(error: BaseException) -> bool:
    """The disk, or a quota on it, is full: waiting may mend that, and no other error.

    What was being written is undone or was never begun.
    """
    return isinstance(error, OSError) and error.errno in _NO_ROOM


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
        """File names, sorted."""
        ...

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """Bytes [offset, offset + size) of a file; size -1 reads to the end."""
        ...

    def get_size(self, name: str) -> int: ...

    def create_file(self, name: str) -> AppendFile:
        """A new file (O_EXCL: FileExistsError if it exists), its directory entry made durable."""
        ...

    def sync(self, name: str) -> None:
        """Make the present content of a file durable, also one that another process wrote; raises
        DiskError."""
        ...

    def replace_file(self, old: str, new: str) -> None:
        """Give the file `old` the name `new`, replacing what had it, durable on return; DiskError.

        A crash leaves the one or the other under `new`, never a mixture."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file, durable on return; raises DiskError."""
        ...


class Background(Protocol):
    """Work on a state so large that the coordinator's turns must not wait for it."""

    def can_run_inline(self, size: int) -> bool:
        """Whether work on so many trajectories is done at once, before `run` returns."""
        ...

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        """Have `work` done on everything as it is now. `done` gets its answer, from `collect`
        unless it is done here, or None when there is none: then `what` is counted and logged."""
        ...

    def collect_results(self) -> None:
        """Hand over the answers that have come since."""
        ...


class InlineBackground:
    """A Background that does everything before `run` returns; what the work raises is raised."""

    def can_run_inline(self, size: int) -> bool:
        return True

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        done(work())

    def collect_results(self) -> None:
        """Nothing is under way."""
