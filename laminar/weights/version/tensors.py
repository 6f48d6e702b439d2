"""Tensors into a slot; engines read them out of its file (engines/weight_file.py).

Reads   torch tensors
Writes  the slot (uint8 view of shared memory); ManifestError for tensors that are not in the layout

Tensors of the published type are copied by numpy, whose copy is memcpy: torch's copy never uses
non-temporal stores and takes up to twice as long. A tensor of another type or device is
converted by torch straight into the slot, which saves the temporary and its page faults.
memcpy itself uses non-temporal stores only above a threshold, by default three quarters of the L3
cache, which no tensor reaches on a large machine; GLIBC_TUNABLES can lower it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from laminar.weights.version.hashes import Bytes, check_room
from laminar.weights.version.manifest import (
    ITEM_BYTES,
    ManifestError,
    TensorSpec,
    aligned,
    check_tensors,
)

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def write_tensors(
    view: Bytes, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fill a slot with a whole version; every tensor of `specs` once, in any order.

    Tensors of another type or device are converted on the way; padding becomes zero, so that equal
    weights have equal digests in every slot. Raises ManifestError for a name or shape that is not
    in `specs`, a repeated or missing tensor, or a slot that is too small. The slot is then partly
    written.
    """
    check_room(view, check_tensors(specs))
    missing = {spec.name: spec for spec in specs}
    for name, tensor in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise ManifestError(f"tensor {name!r} is not in the layout, or was written before")
        if tuple(tensor.shape) != spec.shape:
            shape = tuple(tensor.shape)
            raise ManifestError(f"tensor {name!r} has shape {shape}, the layout says {spec.shape}")
        _write(view, spec, tensor.detach())
    if missing:
        raise ManifestError(f"{len(missing)} tensors were not written: {sorted(missing)[:5]}")


def _write(view: Bytes, spec: TensorSpec, tensor: torch.Tensor) -> None:
    end = spec.offset + spec.nbytes
    if tensor.dtype == TORCH_DTYPES[spec.dtype] and _plain(tensor):
        source = tensor.view(-1).view(torch.uint8).numpy()
        np.copyto(view[spec.offset : end], source)
    else:
        tensor_view(view, spec).copy_(tensor)
    view[end : aligned(end)] = 0


def _plain(tensor: torch.Tensor) -> bool:
    """Whether numpy may read it as one run of bytes."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def tensor_view(view: Bytes, spec: TensorSpec) -> torch.Tensor:
    """One tensor of a slot, without a copy."""
    data = view[spec.offset : spec.offset + spec.nbytes]
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape)
