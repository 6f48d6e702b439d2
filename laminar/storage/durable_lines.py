"""A file of lines that may be reported to other processes: each is on the disk as a whole, or not
at all.

Writes  lines at the end, synced; a last line that a killed process left torn is taken away first
Raises  OSError: nothing of the line is left, the same line can be tried again
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path


class DurableLines:
    """Opened with the first line; this process is the only one that writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0  #: of the whole lines

    async def enter(self, line: bytes) -> None:
        """Durable on return."""
        await asyncio.to_thread(self._append_line, line)

    def _append_line(self, line: bytes) -> None:
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
            self._size = _whole_bytes(self._path)
            os.ftruncate(self._fd, self._size)
        try:
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line) + 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _whole_bytes(path: Path) -> int:
    """Up to the end of the last line that has one: what is behind it was reported to nobody."""
    with path.open("rb") as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))
