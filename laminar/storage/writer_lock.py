"""The lock of a store's database: only one process of the store may write.

Reads   store.lock, next to store.sqlite
Writes  store.lock: incarnation, host and pid of the store that holds it
Gives   WriterLock
Raises  DatabaseHeld while another process has it; DiskError once a later one has had it, and of the
        disk

SQLite's own locks let two processes write in turn; a replaced store must not write at all, on
whatever machine it still lives. The lock ends with its process. A file server may release the lock
of a silent machine, so the holder checks in each transaction whether the file names a later
incarnation.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from laminar.names.ports import DatabaseHeld, DiskError, DiskFull, no_room
from laminar.run.lock import describe_dead_owner, try_lock
from laminar.run.permissions import open_private


class Writer(msgspec.Struct, frozen=True):
    """The present or last holder of the lock."""

    incarnation: int = 0
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        if not self.incarnation:
            return "another store"
        return f"the store with incarnation {self.incarnation} (pid {self.pid} on {self.host})"


class WriterLock:
    """The lock of one database, from construction to `close`."""

    def __init__(self, database: Path, incarnation: int) -> None:
        """Take the lock; `incarnation`: of this process, assigned by the coordinator."""
        self._path = database.with_suffix(".lock")
        self._own = Writer(incarnation, socket.gethostname(), os.getpid())
        try:
            self._fd = open_private(self._path)
        except OSError as error:
            raise self._make_disk_error("opening", error) from error
        try:
            if not try_lock(self._fd, fcntl.LOCK_EX):
                raise DatabaseHeld(self._describe_holder(database))
            self.check_owner()
            self._write()
        except BaseException:
            self.close()
            raise

    def check_owner(self) -> None:
        """Raise DiskError if a later incarnation of the store has taken the database over."""
        last = self._read_writer()
        if last.incarnation > self._own.incarnation:
            raise DiskError(errno.EPERM, f"{last} took over from {self._own}")

    def close(self) -> None:
        """Release the lock; harmless a second time, like the database's."""
        if self._fd >= 0:
            with suppress(OSError):  # of a disk that fails: it would hide why this process ends
                os.close(self._fd)
        self._fd = -1

    def _describe_holder(self, database: Path) -> str:
        last = self._read_writer()
        return f"{last} has {database} open{describe_dead_owner(self._path, last.host, last.pid)}"

    def _write(self) -> None:
        text = msgspec.json.encode(self._own)
        try:
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))
        except OSError as error:
            raise self._make_disk_error("writing", error) from error

    def _read_writer(self) -> Writer:
        """Return the writer by reading the file by name: an open file may be cached."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Writer)
        except (FileNotFoundError, msgspec.DecodeError):  # empty: never locked; or half written
            return Writer()
        except OSError as error:
            raise self._make_disk_error("reading", error) from error

    def _make_disk_error(self, doing: str, error: OSError) -> DiskError:
        kind = DiskFull if no_room(error) else DiskError
        return kind(error.errno, f"{doing} {self._path} failed: {error.strerror}")
