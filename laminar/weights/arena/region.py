"""Bytes in memory, and in which file they are.

Gives   Region; ArenaError when there is no memory behind it

A slot is mapped from a file, so that its bytes can be written and hashed as memory and sent from
the file's pages, without a copy in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

NO_FILE = -1


class ArenaError(RuntimeError):
    """The arena cannot be made or mapped; one sentence with the path, the reason and the fix."""


class Region(NamedTuple):
    """Some bytes."""

    view: memoryview
    fd: int = NO_FILE  #: descriptor of the file that `view` is mapped from
    offset: int = 0  #: in it, of the first byte
    back: Callable[[int, int], None] | None = None  #: gives bytes of the file their memory

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def slice_bytes(self, start: int, end: int) -> Region:
        """Bytes `start` to `end` of it, as far as it reaches."""
        return Region(self.view[start:end], self.fd, self.offset + start, self.back)

    def populate_pages(self) -> None:
        """Have memory behind all of it; to be called before it is written. Raises ArenaError."""
        if self.back is not None:
            self.back(self.offset, self.nbytes)
