"""The tensors of a weight version, where they lie in a file that is mapped, not read.

Reads   WeightSource: a path (shared memory of the relay, mostly), an offset and a table of tensors
Gives   MappedWeights.tensors: (name, tensor) without a copy; EngineError for a file that is too
        short or is gone

Engines know nothing of the weight plane: a plain path, so that a worker process which shares
nothing with the one that asks can load from the same bytes. The mapping is kept from one load to
the next, since the first touch of each page costs more than the copy.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from laminar.engines.protocol import EngineError, WeightSource


class MappedWeights:
    """The file of the last load, mapped for reading."""

    def __init__(self) -> None:
        self._file: tuple[int, int] | None = None  #: device and inode
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    def tensors(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Views in the order of the table; the caller copies them, and never writes."""
        data = self._mapped(source)
        for place in source.tensors:
            start = source.offset + place.offset
            dtype = getattr(torch, place.dtype)
            count = math.prod(place.shape)
            with warnings.catch_warnings():  # that it must not be written to is as it should be
                warnings.simplefilter("ignore")
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start)
            yield place.name, flat.view(place.shape)

    def _mapped(self, source: WeightSource) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        try:
            fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(f"weights {source.path} cannot be read: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            end = source.offset + source.nbytes
            if found.st_size < end:
                raise EngineError(
                    f"weights {source.path} have {found.st_size} bytes, the version ends at {end}"
                )
            if self._bytes is None or self._file != (found.st_dev, found.st_ino):
                memory = mmap.mmap(fd, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
                self._bytes = np.frombuffer(memory, dtype=np.uint8)
                self._file = (found.st_dev, found.st_ino)
        finally:
            os.close(fd)
        return self._bytes
