"""A span of memory with its place in the file that it is mapped from.

Gives   Region; ArenaError if its memory cannot be allocated

A slot is mapped from a file, so that its bytes can be written and hashed as memory and sent from
the file's pages without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

NO_FILE = -1


class ArenaError(RuntimeError):
    """An arena that cannot be created or mapped; the message has the path, reason and fix."""


class ArenaTooLargeError(ArenaError):
    """An arena larger than its file system; another attempt cannot succeed."""


class Region(NamedTuple):
    """A span of memory, and its place in a file if it is mapped from one."""

    view: memoryview
    fd: int = NO_FILE  #: descriptor of the file that `view` is mapped from
    offset: int = 0  #: file offset of the first byte
    back: Callable[[int, int], None] | None = None  #: function that allocates pages of the file

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def slice_bytes(self, start: int, end: int) -> Region:
        """Return bytes `start` to `end`, clipped to the region."""
        return Region(self.view[start:end], self.fd, self.offset + start, self.back)

    def populate_pages(self) -> None:
        """Allocate all pages of the region, before it is written; raise ArenaError."""
        if self.back is not None:
            self.back(self.offset, self.nbytes)
