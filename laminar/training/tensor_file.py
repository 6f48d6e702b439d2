"""A safetensors file whose rows are written by several processes.

Writes  the file: `create` its header and its size, `write` rows into it; OSError from the disk
Gives   the bytes that the safetensors library would write, whoever wrote which rows

The library takes whole tensors of one process. Tensors lie in the order of that library: those with
the longest elements first, then by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ALIGNMENT = 8
"""The header is padded with spaces to a multiple."""


class Rows(NamedTuple):
    """Consecutive rows of a tensor, along its first dimension; all of one without dimensions."""

    shape: tuple[int, ...]  #: of the whole tensor
    first: int
    data: Tensor


def create(path: Path, tensors: Mapping[str, Rows]) -> None:
    """A file with room for these tensors, each of which may have any of its rows here."""
    header, _, end = _layout(tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(end)


def write(path: Path, tensors: Mapping[str, Rows]) -> None:
    """Put these rows where they belong in a file that was created with the same tensors."""
    _, begins, _ = _layout(tensors)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, rows in tensors.items():
            if rows.data.numel():
                row_bytes = rows.data.element_size() * math.prod(rows.shape[1:])
                _write_at(fd, rows.data, begins[name] + rows.first * row_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(fd)


def _layout(tensors: Mapping[str, Rows]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor begins in the file, and where the file ends."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].data.element_size(), name)):
        shape, dtype = tensors[name].shape, tensors[name].data.dtype
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


def _write_at(fd: int, tensor: Tensor, offset: int) -> None:
    """As often as it takes: one call writes two gigabytes at most."""
    left = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
