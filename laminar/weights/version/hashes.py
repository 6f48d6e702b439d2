"""Hashes of the weights in a slot, and their check against the published ones.

Reads   a slot (uint8 view of shared memory)
Gives   checksums, manifests; WeightsCorrupt if bytes differ from the manifest

Does not import torch: relays compute these hashes, and a killed relay must restart in a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from laminar.run.work_counter import count_work
from laminar.weights.version.manifest import (
    Manifest,
    ManifestError,
    Probe,
    TensorSpec,
    check_tensors,
    chunk_bounds,
)

Bytes = npt.NDArray[np.uint8]  #: uint8 [n], contiguous

CHUNK_BYTES = 4 << 20
"""Size of a chunk: in smaller ones the cost per chunk shows, larger ones leave the cache between
socket and checksum."""


class WeightsCorrupt(RuntimeError):
    """Bytes of a version that differ from the published ones."""


def compute_checksums(view: Bytes, total_bytes: int, chunk_bytes: int) -> tuple[list[int], str]:
    """Return the xxh3_64 of each chunk and the xxh3_128 of all `total_bytes`, as 32 hex digits.

    Both hashes take a chunk while it is in the cache, so the memory is read once.
    """
    return _hash_chunks(view, [*range(0, total_bytes, chunk_bytes), total_bytes])


def build_manifest(
    view: Bytes,
    *,
    version: int,
    step: int,
    tensors: tuple[TensorSpec, ...],
    probe: Probe,
    chunk_bytes: int = CHUNK_BYTES,
) -> Manifest:
    """Build the manifest of a full version that one trainer rank has written into this slot.

    Raises ManifestError for an inconsistent layout or a slot that is smaller than the version.
    """
    total = check_tensors(tensors)
    checksums, digest = compute_checksums(view, total, chunk_bytes)
    return Manifest(
        version=version,
        step=step,
        kind="full",
        dtype=tensors[0].dtype,
        total_bytes=total,
        tensors=tensors,
        chunk_bytes=chunk_bytes,
        probe=probe,
        chunk_checksums=tuple(checksums),
        digest=digest,
    )


def verify_weights(view: Bytes, manifest: Manifest) -> None:
    """Raise WeightsCorrupt, naming the first wrong chunk, unless all bytes are as published.

    Raises ManifestError if the slot is smaller than the version.
    """
    chunks, digest = _hash_chunks(view, chunk_bounds(manifest))
    for index, (wanted, found) in enumerate(zip(manifest.chunk_checksums, chunks, strict=True)):
        if wanted != found:
            raise WeightsCorrupt(
                f"version {manifest.version}, chunk {index} of {len(chunks)}: "
                f"expected xxh3_64 {wanted:016x}, found {found:016x}"
            )
    if digest != manifest.digest:
        raise WeightsCorrupt(
            f"version {manifest.version}, all {len(chunks)} chunks match: "
            f"expected xxh3_128 {manifest.digest}, found {digest}"
        )


def _hash_chunks(view: Bytes, bounds: Sequence[int]) -> tuple[list[int], str]:
    """Return the xxh3_64 of each chunk between the bounds, and the xxh3_128 of all."""
    check_room(view, bounds[-1])
    whole = xxhash.xxh3_128()
    chunks: list[int] = []
    for start, end in pairwise(bounds):
        chunk = view.data[start:end]
        chunks.append(xxhash.xxh3_64_intdigest(chunk))
        whole.update(chunk)
        count_work()
    return chunks, whole.hexdigest()


def check_room(view: Bytes, total_bytes: int) -> None:
    """Raise ManifestError if a version of `total_bytes` does not fit into this slot."""
    if view.nbytes < total_bytes:
        raise ManifestError(
            f"a version of {total_bytes} bytes does not fit into a slot of {view.nbytes}"
        )
