"""A safetensors file whose rows are written by several processes.

Writes  the file: `create_file` its header and size, `write_rows` rows into it
Raises  OSError from the disk
Gives   the bytes that the safetensors library would write, whichever process wrote which rows, and
        digests of them; `rows_of`

The library takes only whole tensors of one process. Tensors are in its order: longest elements
first, then by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from laminar.run.work_counter import count_work

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ALIGNMENT = 8  #: the header is padded with spaces to a multiple of this
BLOCK_BYTES = 1 << 24  #: in one write


class Rows(NamedTuple):
    """Consecutive rows of a tensor along its first dimension; all of it if it has no dimensions."""

    shape: tuple[int, ...]  #: of the whole tensor
    first: int
    data: Tensor
    replicated: bool = False  #: whether every rank has these rows


def rows_of(tensor: Tensor) -> Rows:
    """Return this rank's rows of a tensor, not copied; of an unsharded one, all."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Rows(shape, 0, tensor.detach(), replicated=True)
    mesh = tensor.device_mesh
    shards = mesh.ndim - 1  # the dimension before it, if any, has nodes with equal rows
    first, _ = get_row_range(shape[0], mesh.get_local_rank(shards), mesh.size(shards))
    with torch.no_grad():
        return Rows(shape, first, tensor.to_local())


def iter_rows(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Rows]]:
    """Yield this rank's rows of each tensor; only one of the tensors needs to exist at a time."""
    return ((name, rows_of(tensor)) for name, tensor in tensors)


def get_row_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return [first, end) of the rows of a rank, as FSDP2 shards them."""
    each = -(-length // size)
    return min(rank * each, length), min((rank + 1) * each, length)


class WrittenSpan(NamedTuple):
    """Consecutive bytes of a file, as one process wrote them."""

    offset: int
    nbytes: int
    digest: str  #: xxh3_128


WrittenFiles = Mapping[str, Iterable[WrittenSpan]]
"""Spans by file, in any order."""


class SpanDigests:
    """Digests of what a process writes to a file."""

    def __init__(self) -> None:
        self._ended: list[WrittenSpan] = []
        self._start = self._end = 0
        self._open = xxhash.xxh3_128()

    def update(self, offset: int, data: bytes | memoryview) -> None:
        """Add bytes at an offset; they extend the last span or begin another."""
        if offset != self._end:
            self._ended, self._start, self._end = self.spans, offset, offset
            self._open = xxhash.xxh3_128()
        self._open.update(data)
        self._end += len(data)

    @property
    def spans(self) -> list[WrittenSpan]:
        last = WrittenSpan(self._start, self._end - self._start, self._open.hexdigest())
        return [*self._ended, last] if last.nbytes else self._ended


class TensorLayout(NamedTuple):
    """Shape and type of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


TensorLayouts = Mapping[str, TensorLayout]


def sort_rows(tensors: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the rows in the order of a file, so that one process writes it as one span."""
    layouts = get_layouts(tensors)
    return {name: tensors[name] for name in _sort_names(layouts)}


def get_layouts(tensors: Mapping[str, Rows]) -> TensorLayouts:
    return {name: TensorLayout(rows.shape, rows.data.dtype) for name, rows in tensors.items()}


def create_file(path: Path, tensors: TensorLayouts) -> None:
    """Create a file with room for these tensors, and its folder if needed."""
    header, _, end = _plan_file(tensors)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(end)


def write_rows(
    path: Path, tensors: TensorLayouts, found: Iterable[tuple[str, Rows]], rank: int = 0
) -> list[WrittenSpan]:
    """Write rows at their positions in a file that was created for the same tensors.

    Only one item of `found` needs to exist at a time. Rank 0 alone writes what all ranks have, and
    digests the header."""
    header, begins, _ = _plan_file(tensors)
    digests = SpanDigests()
    digests.update(0, b"" if rank else header)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, rows in found:
            if rows.data.numel() and not (rank and rows.replicated):
                row_bytes = rows.data.element_size() * math.prod(rows.shape[1:])
                _write_at(fd, rows.data, begins[name] + rows.first * row_bytes, digests)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(fd)
    return digests.spans


def _plan_file(tensors: TensorLayouts) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the offset of each tensor in the file, and the file's size."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name in _sort_names(tensors):
        shape, dtype = tensors[name]
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {
            "dtype": DTYPES[dtype],
            "shape": shape,
            "data_offsets": (begins[name], end),
        }
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + at for name, at in begins.items()}, len(header) + end


def _sort_names(tensors: TensorLayouts) -> list[str]:
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _write_at(fd: int, tensor: Tensor, offset: int, digests: SpanDigests) -> None:
    """Write all bytes of a tensor, in blocks that are digested while they are in the cache."""
    left = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(fd, left[:BLOCK_BYTES], offset)
        count_work()
        digests.update(offset, left[:written])
        left, offset = left[written:], offset + written
