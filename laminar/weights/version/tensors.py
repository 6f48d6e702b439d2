"""Writing of tensors to a slot, from whose file engines read them (engines/weight_file.py).

Reads   torch tensors
Writes  the slot (uint8 view of shared memory); ManifestError for tensors outside the layout

Tensors of the published type are copied by numpy, whose copy is memcpy: torch's copy never uses
non-temporal stores and takes up to twice as long. A CPU tensor of another type is converted by
torch straight into the slot, which saves the temporary and its page faults; a GPU's is converted
there first: torch would copy it to pageable memory as it is, and convert it on one more pass.
memcpy itself uses non-temporal stores only above a threshold, by default three quarters of the L3
cache, which no tensor reaches on a large machine; GLIBC_TUNABLES can lower it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from laminar.run.work_counter import count_work
from laminar.weights.version.hashes import Bytes, check_room
from laminar.weights.version.manifest import (
    ITEM_BYTES,
    ManifestError,
    TensorSpec,
    align_offset,
    check_tensors,
)

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

NamedRows = tuple[str, int, torch.Tensor]
"""Name, first row and rows of a tensor, along its first dimension."""


def write_tensors(
    view: Bytes, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fill a slot with a whole version: every tensor of `specs` once, in any order.

    Raises ManifestError as `write_rows` does, and for a tensor of another shape.
    """
    shapes = {spec.name: spec.shape for spec in specs}

    def whole() -> Iterator[NamedRows]:
        for name, tensor in tensors:
            shape = tuple(tensor.shape)
            if shape != shapes.get(name, shape):
                raise ManifestError(
                    f"tensor {name!r} has shape {shape}, the layout says {shapes[name]}"
                )
            yield name, 0, tensor

    write_rows(view, specs, whole())


def write_rows(view: Bytes, specs: Sequence[TensorSpec], rows: Iterable[NamedRows]) -> None:
    """Write rows to a slot; every tensor of `specs` is given, possibly with zero rows.

    A tensor may come in parts with ascending rows; the rows between them are those of another
    process. Rows of another type or device are converted; padding becomes zero, so that equal
    weights have equal digests in every slot. Raises ManifestError for rows that are not in `specs`,
    repeated rows, a missing tensor, or a slot that is too small. The slot is then partly written.
    """
    check_room(view, check_tensors(specs))
    missing, spec, written = {spec.name: spec for spec in specs}, None, 0
    for name, first, tensor in rows:
        if spec is None or spec.name != name:
            spec, written = missing.pop(name, None), 0
        if spec is None:
            raise ManifestError(f"tensor {name!r} is not in the layout, or was written before")
        if first < written:
            raise ManifestError(f"rows from {first} of {name!r} are written again or out of order")
        written = first + (len(tensor) if spec.shape else 1)
        if spec.shape:
            _write_tensor(view, _locate_rows(spec, first, tensor), tensor.detach())
        else:
            _write_tensor(view, spec, tensor.detach())
        end = spec.offset + spec.nbytes
        view[end : align_offset(end)] = 0
        count_work()
    if missing:
        raise ManifestError(f"{len(missing)} tensors were not written: {sorted(missing)[:5]}")


def _locate_rows(spec: TensorSpec, first: int, rows: torch.Tensor) -> TensorSpec:
    """Return the place of some rows of a tensor, in the form of its own."""
    shape = tuple(rows.shape)
    if shape[1:] != spec.shape[1:] or first + shape[0] > spec.shape[0]:
        raise ManifestError(
            f"rows from {first} of tensor {spec.name!r} have shape {shape}, the layout says "
            f"{spec.shape}"
        )
    row_bytes = spec.nbytes // spec.shape[0]
    offset = spec.offset + first * row_bytes
    return replace(spec, shape=shape, offset=offset, nbytes=shape[0] * row_bytes)


def _write_tensor(view: Bytes, place: TensorSpec, tensor: torch.Tensor) -> None:
    if not place.nbytes:
        return
    if tensor.dtype == TORCH_DTYPES[place.dtype] and _is_plain(tensor):
        source = tensor.view(-1).view(torch.uint8).numpy()
        np.copyto(view[place.offset : place.offset + place.nbytes], source)
        return
    if tensor.device.type != "cpu":
        tensor = tensor.to(TORCH_DTYPES[place.dtype])
    tensor_view(view, place).copy_(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether numpy can read the tensor as one contiguous run of bytes."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def tensor_view(view: Bytes, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor of a slot, without a copy."""
    data = view[spec.offset : spec.offset + spec.nbytes]
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape)
