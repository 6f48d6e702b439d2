"""A file of durable lines: each is on disk as a whole or not at all.

Writes  lines at the end, synced; first removes a torn last line that a killed process left
Raises  OSError: nothing of the line is left, the same line can be retried
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path


class DurableLines:
    """A file of durable lines with one writing process, opened with the first line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = -1  #: bytes of the complete lines; unknown before the first line

    async def enter(self, line: bytes) -> None:
        """Append a line, durable on return."""
        await asyncio.to_thread(self._append_line, line)

    def _append_line(self, line: bytes) -> None:
        try:
            self._open()
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fdatasync(self._fd)
        except OSError:
            self.close()  # the next try removes what is left of the line
            raise
        self._size += len(line) + 1

    def _open(self) -> None:
        """Open the file and remove a torn line, unless it is open."""
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
            if self._size < 0:
                self._size = _whole_bytes(self._path)
            os.ftruncate(self._fd, self._size)

    def close(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = -1


def _whole_bytes(path: Path) -> int:
    """Return the size up to the last complete line; a torn one was never reported."""
    with path.open("rb") as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))
