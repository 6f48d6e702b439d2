"""Telemetry files that grow by whole lines or rows.

Reads   the end of an existing file
Writes  files of a run directory
Raises  OSError, PartlyWritten: the outlet counts lost items

A full disk tears a line in two. The end of the file is repaired before the next write, so that
readers lose only the torn line: a torn line is ended, a torn row is cut off. Files and folders are
created with the first write, except for a run directory that is gone.

A file of lines may be split into parts: a full one is renamed, and only the newest are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar.observe.telemetry import PartlyWritten
from laminar.run.directory import older_parts
from laminar.run.renames import rename

PART_BYTES = 64 << 20
PARTS_KEPT = 4  #: parts of a log or timeline, with the growing one: at most some 250 MB per process

Mend = Callable[[int, int], None]
"""(descriptor, size after the last whole write): repairs the end of a file for appending."""


def end_line(fd: int, whole: int) -> None:
    """End a torn line; readers skip it."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")


def cut_off(fd: int, whole: int) -> None:
    """Cut a file that only this process writes after its last whole write."""
    os.ftruncate(fd, whole)


def cut_rows(row_bytes: int) -> Mend:
    """Return the repair function for rows of a fixed size."""

    def mend(fd: int, whole: int) -> None:
        size = os.fstat(fd).st_size
        os.ftruncate(fd, size - size % row_bytes)

    return mend


class GrowingFile:
    """A file of appended lines or rows; repaired before the first write and after every failure."""

    def __init__(
        self, run_dir: Path, name: str, mend: Mend = end_line, *, in_parts: bool = False
    ) -> None:
        """Open nothing yet; `in_parts`: split it when full, and keep the newest parts only."""
        self._run_dir, self._name, self._mend = run_dir, name, mend
        self._in_parts = in_parts
        self._path = run_dir / name
        self._fd = -1
        self._size = 0  #: bytes after the last whole write
        self._mended = False

    def write(self, items: Sequence[bytes]) -> None:
        self._open()
        if self._in_parts and self._size >= PART_BYTES:
            self._set_aside()
        if not self._mended:
            self._mend(self._fd, self._size)
            self._mended = True
        self._append(items)

    @property
    def size(self) -> int:
        """Present size in bytes; OSError if it cannot be read."""
        self._open()
        return self._size

    def _open(self) -> None:
        if self._fd < 0:
            self._path = _resolve_path(self._run_dir, self._name)
            self._open_file()

    def _open_file(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def _set_aside(self) -> None:
        parts = older_parts(self._path)
        number = parts[-1][0] + 1 if parts else 1
        rename(self._path, Path(f"{self._path}.{number}"), durable=False)
        os.close(self._fd)
        self._fd = -1
        self._open_file()
        for old, path in parts:
            if old <= number - (PARTS_KEPT - 1):
                path.unlink(missing_ok=True)

    def _append(self, items: Sequence[bytes]) -> None:
        rest = memoryview(b"".join(items))
        written = 0
        try:
            while rest:
                count = os.write(self._fd, rest)
                written, rest = written + count, rest[count:]
        except OSError as error:
            self._mended = False
            done = _count_whole_items(items, written)
            self._size += sum(map(len, items[:done]))
            raise PartlyWritten(done, error) from error
        self._size += written


def _count_whole_items(items: Sequence[bytes], written: int) -> int:
    """Return how many items end within the first `written` bytes."""
    done = 0
    while done < len(items) and len(items[done]) <= written:
        written -= len(items[done])
        done += 1
    return done


def _resolve_path(run_dir: Path, name: str) -> Path:
    """Return the file's real path, so that a later change of logs/latest does not affect it."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is gone")
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.resolve()
