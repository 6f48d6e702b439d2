"""What reward functions print: kept in a file of limited size.

Reads   bytes from the workers of a pool
Writes  RUN/logs/latest/NAME.reward.log, by the telemetry thread
Raises  OSError: the outlet counts what is lost

What user code prints belongs on no terminal, and may go on for days. What came first is kept:
there is the beginning of whatever went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

OUTPUT_BYTES_MAX = 8 << 20
"""Of one replica: more is not read, and a thousand replicas may share a file system."""
PIECES_KEPT_MAX = 256
"""Waiting for the file; each is what a pipe holds, 64 KiB."""


class OutputLog:
    """The file; one process writes it at a time."""

    def __init__(self, path: Path, bytes_max: int = OUTPUT_BYTES_MAX) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._full = False

    def write(self, pieces: Sequence[bytes]) -> None:
        if self._full:
            return
        data = b"".join(pieces)
        with open(self._path, "ab") as file:
            room = self._bytes_max - file.tell()
            self._full = len(data) > room
            if room > 0:
                file.write(data[:room] + (self._end() if self._full else b""))

    def _end(self) -> bytes:
        return f"\n... what is printed beyond {self._bytes_max} bytes is not kept\n".encode()
