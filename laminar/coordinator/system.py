"""The real disk: one directory of append-only files.

Reads / writes   files of the directory, by name
Raises           DiskError for every failed read, create, write, sync, renaming and removal;
                 DiskFull for lack of room

A name is durable only once its directory is synced, so a new file is returned only after that. A
short write is continued; on a full disk the continuation fails. Nothing is retried.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from laminar.config import ConfigError
from laminar.names.ports import AppendFile, DiskError, DiskFull
from laminar.run.renames import rename, sync


class RealAppendFile:
    """A file opened for appending; it owns the descriptor."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                written = os.write(self._fd, rest)
            except OSError as error:
                raise _make_disk_error("write", self._name, error) from error
            if written == 0:
                raise DiskError(f"writing {self._name} wrote none of {len(rest)} bytes")
            rest = rest[written:]

    def sync(self) -> None:
        _sync_data(self._fd, self._name)

    def close(self) -> None:
        with suppress(OSError):  # of a disk that fails: what counts was synced
            os.close(self._fd)


class RealDisk:
    """The ports.Disk of an existing directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory: name the directory of a run")
        self._directory = directory

    @classmethod
    def make_directory(cls, directory: Path) -> RealDisk:
        """Make the directory unless it exists, its own entry durable; the parent must exist."""
        try:
            directory.mkdir(exist_ok=True)
            sync(directory.parent)
        except OSError as error:
            raise _make_disk_error("creation", str(directory), error) from error
        return cls(directory)

    def list_names(self) -> list[str]:
        return sorted(os.listdir(self._directory))

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        try:
            with open(self._directory / name, "rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise _make_disk_error("read", name, error) from error

    def get_size(self, name: str) -> int:
        return os.stat(self._directory / name).st_size

    def sync(self, name: str) -> None:
        """Make the content of a file durable, also if another process wrote it; raise DiskError."""
        fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync_data(fd, name)
        finally:
            os.close(fd)

    def create_file(self, name: str) -> AppendFile:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            # Sync names that a killed process left unsynced first: the numbers have no gap.
            sync(self._directory)
            fd = os.open(self._directory / name, flags, 0o644)
        except FileExistsError:
            raise
        except OSError as error:
            raise _make_disk_error("creation", name, error) from error
        try:
            sync(self._directory)
        except OSError as error:
            os.close(fd)
            raise _make_disk_error("directory sync", name, error) from error
        return RealAppendFile(fd, name)

    def replace_file(self, old: str, new: str) -> None:
        try:
            rename(self._directory / old, self._directory / new, durable=True)
        except OSError as error:
            raise _make_disk_error("renaming", f"{old} to {new}", error) from error

    def remove(self, name: str) -> None:
        try:
            os.unlink(self._directory / name)
            sync(self._directory)
        except OSError as error:
            raise _make_disk_error("removal", name, error) from error


def _sync_data(fd: int, name: str) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise _make_disk_error("sync", name, error) from error


def _make_disk_error(what: str, name: str, error: OSError) -> DiskError:
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError
    return kind(error.errno, f"{what} of {name} failed: {error.strerror}")
