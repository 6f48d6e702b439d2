"""Memory mapping of the file that has a weight version.

Reads   WeightSource: a path (usually the relay's shared memory) and an offset
Gives   MappedFile; EngineError for a file that is too short or missing

Engines know nothing of the weight plane and take a plain path, so that a worker process that shares
nothing with its caller can load the same bytes. The mapping is kept from one load to the next,
because the first touch of each page costs more than the copy.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from laminar.engines.protocol import EngineError, WeightSource

FileBytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class MappedFile:
    """Mapping of the file of the last load, for reading."""

    def __init__(self) -> None:
        self._file: tuple[int, int] | None = None  #: device and inode
        self._bytes: FileBytes | None = None

    def map_source(self, source: WeightSource) -> FileBytes:
        """Map the whole file of a source; callers must not write to it."""
        try:
            fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(f"weights {source.path} cannot be read: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            end = source.offset + source.nbytes
            if found.st_size < end:
                raise EngineError(
                    f"weights {source.path} have {found.st_size} bytes, the version needs {end}"
                )
            if self._bytes is None or self._file != (found.st_dev, found.st_ino):
                memory = mmap.mmap(fd, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
                self._bytes = np.frombuffer(memory, dtype=np.uint8)
                self._file = (found.st_dev, found.st_ino)
        finally:
            os.close(fd)
        return self._bytes
