"""Tensors into a slot, tensors out of a slot, and the hashes over what lies in it.

Reads   torch tensors and a slot (uint8 view of shared memory)
Writes  the slot
Gives   torch views of a slot; checksums; WeightsCorrupt when bytes are not what the manifest says

Tensors of the published type are copied by numpy, whose copy is memcpy: torch's copy never uses
non-temporal stores and takes up to twice as long. A tensor of another type or device is
converted by torch straight into the slot, which saves the temporary and its page faults.
memcpy itself uses non-temporal stores only above a threshold, by default three quarters of the L3
cache, which no tensor reaches on a large machine; GLIBC_TUNABLES can lower it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from laminar.weights.manifest import (
    ITEM_BYTES,
    Draft,
    Manifest,
    ManifestError,
    TensorSpec,
    aligned,
    check_tensors,
    chunk_bounds,
    chunks_of_ranks,
)

Bytes = npt.NDArray[np.uint8]  #: uint8 [n], contiguous

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


class WeightsCorrupt(RuntimeError):
    """Bytes of a version are not those that were published."""


def write_tensors(
    view: Bytes, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fill a slot with a whole version; every tensor of `specs` once, in any order.

    Tensors of another type or device are converted on the way; padding becomes zero, so that equal
    weights have equal digests in every slot. Raises ManifestError for a name or shape that is not
    in `specs`, a repeated or missing tensor, or a slot that is too small. The slot is then partly
    written.
    """
    _check_room(view, check_tensors(specs))
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


def read_tensors(view: Bytes, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the version's tensors in the slot, in layout order, without a copy.

    The caller copies while it holds the lease and never writes: the memory is shared.
    """
    _check_room(view, manifest.total_bytes)
    for spec in manifest.tensors:
        yield spec.name, _tensor_view(view, spec)


def checksums(view: Bytes, total_bytes: int, chunk_bytes: int) -> tuple[list[int], str]:
    """(xxh3_64 of each chunk, xxh3_128 of all as 32 hex digits) of the first `total_bytes`.

    Both hashes take a chunk while it is in the cache, so the memory is read once.
    """
    return _hashes(view, [*range(0, total_bytes, chunk_bytes), total_bytes])


def share_checksums(view: Bytes, draft: Draft, ranks: Collection[int]) -> dict[int, int]:
    """xxh3_64 of each chunk that these ranks wrote, by the chunk's index in `draft`.

    Raises ManifestError if the slot is smaller than the version.
    """
    _check_room(view, draft.total_bytes)
    bounds = chunk_bounds(draft)
    return {
        index: xxhash.xxh3_64_intdigest(view.data[bounds[index] : bounds[index + 1]])
        for index in chunks_of_ranks(draft, ranks)
    }


def verify(view: Bytes, manifest: Manifest) -> None:
    """Raises WeightsCorrupt, which names the first wrong chunk, unless all bytes are as published.

    Raises ManifestError if the slot is smaller than the version.
    """
    chunks, digest = _hashes(view, chunk_bounds(manifest))
    for index, (wanted, found) in enumerate(zip(manifest.chunk_checksums, chunks, strict=True)):
        if wanted != found:
            raise WeightsCorrupt(
                f"version {manifest.version}, chunk {index} of {len(chunks)}: "
                f"expected xxh3_64 {wanted:016x}, found {found:016x}"
            )
    if digest != manifest.digest:
        raise WeightsCorrupt(
            f"version {manifest.version}, all {len(chunks)} chunks right: "
            f"expected xxh3_128 {manifest.digest}, found {digest}"
        )


def _hashes(view: Bytes, bounds: Sequence[int]) -> tuple[list[int], str]:
    """xxh3_64 of each chunk between the bounds, and xxh3_128 of all of them."""
    _check_room(view, bounds[-1])
    whole = xxhash.xxh3_128()
    chunks: list[int] = []
    for start, end in pairwise(bounds):
        chunk = view.data[start:end]
        chunks.append(xxhash.xxh3_64_intdigest(chunk))
        whole.update(chunk)
    return chunks, whole.hexdigest()


def _write(view: Bytes, spec: TensorSpec, tensor: torch.Tensor) -> None:
    end = spec.offset + spec.nbytes
    if tensor.dtype == TORCH_DTYPES[spec.dtype] and _plain(tensor):
        source = tensor.view(-1).view(torch.uint8).numpy()
        np.copyto(view[spec.offset : end], source)
    else:
        _tensor_view(view, spec).copy_(tensor)
    view[end : aligned(end)] = 0


def _plain(tensor: torch.Tensor) -> bool:
    """Whether numpy may read it as one run of bytes."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _tensor_view(view: Bytes, spec: TensorSpec) -> torch.Tensor:
    data = view[spec.offset : spec.offset + spec.nbytes]
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _check_room(view: Bytes, total_bytes: int) -> None:
    if view.nbytes < total_bytes:
        raise ManifestError(f"a version of {total_bytes} bytes, a slot of {view.nbytes}")
