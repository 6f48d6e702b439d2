"""What reward functions print: kept in a file of limited size.

Reads   bytes from the workers of a pool
Writes  RUN/logs/latest/NAME.reward.log

User code that prints belongs to nobody's terminal, and may print for days. What came first is kept:
there is the beginning of whatever went wrong. A file that cannot be written concerns only itself.
"""

from __future__ import annotations

from pathlib import Path

OUTPUT_BYTES_MAX = 8 << 20
"""Of one replica: more is not read by anybody, and a thousand replicas share a file system."""


class OutputLog:
    """Takes what is printed; call it with each piece."""

    def __init__(self, path: Path, bytes_max: int = OUTPUT_BYTES_MAX) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._full = False

    def __call__(self, data: bytes) -> None:
        if self._full:
            return
        try:
            with open(self._path, "ab") as file:
                room = self._bytes_max - file.tell()
                self._full = len(data) > room
                if room > 0:
                    file.write(data[:room] + (self._end() if self._full else b""))
        except OSError:  # its disk is full, or it is gone: what is printed is lost
            return

    def _end(self) -> bytes:
        return f"\n... what is printed beyond {self._bytes_max} bytes is not kept\n".encode()
