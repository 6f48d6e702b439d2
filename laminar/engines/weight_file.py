"""The tensors of a weight version as views of a mapped file.

Reads   WeightSource: a file (mapped_file.py) and a table of tensors
Gives   MappedWeights.iter_tensors: (name, tensor) without a copy; whole_among; EngineError
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch

from laminar.engines.mapped_file import MappedFile
from laminar.engines.protocol import TensorPlace, WeightSource
from laminar.run.work_counter import count_work


def whole_among(places: Sequence[TensorPlace], num_bytes: int) -> int:
    """Count the tensors, in the order of their table, that end within the first bytes."""
    ends = (p.offset + math.prod(p.shape) * getattr(torch, p.dtype).itemsize for p in places)
    return sum(1 for _ in takewhile(lambda end: end <= num_bytes, ends))


class MappedWeights(MappedFile):
    """Mapping of the file of the last load, for reading as tensors."""

    def iter_tensors(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views in the order of the table; callers copy them and never write."""
        data = self.map_source(source)
        for place in source.tensors:
            start = source.offset + place.offset
            dtype = getattr(torch, place.dtype)
            count = math.prod(place.shape)
            with warnings.catch_warnings():  # of a read-only buffer, which is intended
                warnings.simplefilter("ignore")
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start)
            yield place.name, flat.view(place.shape)
            count_work()
