"""The tensors of a weight version, where they lie in a file that is mapped, not read.

Reads   WeightSource: a file (mapped_file.py) and a table of tensors
Gives   MappedWeights.tensors: (name, tensor) without a copy; whole_among; EngineError
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch

from laminar.engines.mapped_file import MappedFile
from laminar.engines.protocol import TensorPlace, WeightSource


def whole_among(places: Sequence[TensorPlace], num_bytes: int) -> int:
    """How many tensors, in the order of their table, end within the first bytes of a version."""
    ends = (p.offset + math.prod(p.shape) * getattr(torch, p.dtype).itemsize for p in places)
    return sum(1 for _ in takewhile(lambda end: end <= num_bytes, ends))


class MappedWeights:
    """The file of the last load, mapped for reading."""

    def __init__(self) -> None:
        self._file = MappedFile()

    def iter_tensors(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Views in the order of the table; the caller copies them, and never writes."""
        data = self._file.map_source(source)
        for place in source.tensors:
            start = source.offset + place.offset
            dtype = getattr(torch, place.dtype)
            count = math.prod(place.shape)
            with warnings.catch_warnings():  # that it must not be written to is as it should be
                warnings.simplefilter("ignore")
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start)
            yield place.name, flat.view(place.shape)
