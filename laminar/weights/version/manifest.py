"""Manifest of a weight version: its tensors, the layout of their bytes, and their hashes.

Reads   names and shapes of parameters (Hugging Face names, in the order the trainer gives)
Gives   TensorSpec, Probe, Manifest, as MessagePack; ManifestError otherwise

Every manifest is consistent, since the checks run whenever one is built or decoded; readers can
trust its offsets. Offsets are aligned to a cache line, so that a tensor of any type can be viewed
in place. The probe is part of the manifest because a digest proves the bytes and not their effect:
a tied head left packed has the correct digest and the wrong policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

from laminar.events.families import Family, Item

ALIGNMENT = 64  #: alignment of tensors in bytes: a cache line, and a multiple of every item size
MANIFEST_BYTES_MAX = 64 << 20
"""Maximum size of a manifest; 1 TB in chunks of 1 MiB with 100,000 tensors needs about 20 MB."""
CHUNKS_MAX = 1 << 22
"""Maximum number of chunks: 4 TB in chunks of 1 MiB; a relay keeps some 20 bytes for each."""
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element by the torch name of its type."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Shape = Annotated[tuple[Positive, ...], msgspec.Meta(max_length=8)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class ManifestError(ValueError):
    """A layout or bytes that do not describe a weight version."""


class TensorSpec(Item, frozen=True, kw_only=True):
    """A tensor of a version, stored contiguously in row-major order."""

    name: Name
    dtype: str  #: a key of ITEM_BYTES
    shape: Shape
    offset: Natural  #: bytes from the start of the version, a multiple of ALIGNMENT
    nbytes: Positive


class Probe(Item, frozen=True, kw_only=True):
    """A few sequences scored by the trainer; a replica must reproduce the scores after loading."""

    sequences: tuple[tuple[Natural, ...], ...]  #: token ids, at least two per sequence
    logprobs: tuple[tuple[float, ...], ...]  #: log-probs of tokens 1..L-1 at temperature 1
    tolerance: float  #: largest |difference| of one log-prob, nats
    mean_tolerance: float  #: largest mean |difference|, nats

    def __post_init__(self) -> None:
        if not self.sequences or min(map(len, self.sequences)) < 2:
            raise ManifestError("a probe needs sequences of at least two tokens")
        wanted = [len(sequence) - 1 for sequence in self.sequences]
        found = [len(row) for row in self.logprobs]
        if wanted != found:
            raise ManifestError(f"the probe has {found} log-probs, its sequences need {wanted}")
        if not all(math.isfinite(value) for row in self.logprobs for value in row):
            raise ManifestError("a log-prob of the probe is not finite")
        for limit in (self.tolerance, self.mean_tolerance):
            if not (math.isfinite(limit) and limit > 0):
                raise ManifestError(f"the probe's tolerance {limit} is not a positive number")


class Manifest(Item, frozen=True, kw_only=True):
    """A complete version; building or decoding an inconsistent one raises."""

    version: Natural
    step: Natural  #: training step that made these weights
    kind: Literal["full", "adapter"]
    dtype: str  #: type of every tensor
    total_bytes: Positive
    tensors: tuple[TensorSpec, ...]  #: ascending offsets
    chunk_bytes: Positive  #: size of the longest chunk
    probe: Probe | None
    chunk_checksums: tuple[Natural, ...]  #: xxh3_64 of each chunk, see `chunk_bounds`
    digest: Digest  #: xxh3_128 of all total_bytes, padding included

    def __post_init__(self) -> None:
        if self.kind == "adapter":
            raise ManifestError("kind 'adapter' is reserved; only full versions are supported")
        end = check_tensors(self.tensors)
        if end != self.total_bytes:
            raise ManifestError(f"the tensors take {end} bytes, total_bytes is {self.total_bytes}")
        other = next((spec for spec in self.tensors if spec.dtype != self.dtype), None)
        if other is not None:
            raise ManifestError(f"tensor {other.name!r} is {other.dtype}, not {self.dtype}")
        count = count_chunks(self)
        if count > CHUNKS_MAX:
            raise ManifestError(f"{count} chunks are above the limit of {CHUNKS_MAX}")
        if len(self.chunk_checksums) != count:
            raise ManifestError(f"{len(self.chunk_checksums)} checksums for {count} chunks")


_encoder = msgspec.msgpack.Encoder()
_family = Family[Manifest](
    Manifest,
    "not a manifest: {kind}: {error}",
    "manifest of {size} bytes is above the limit of {limit}",
    ManifestError,
)


def make_layout(
    named_shapes: Iterable[tuple[str, Sequence[int]]], dtype: str
) -> tuple[TensorSpec, ...]:
    """Place tensors consecutively at aligned offsets, in the order given.

    The same names and shapes give the same offsets on every rank. Raises ManifestError for an
    unknown type, no tensors, a repeated name or a tensor without elements.
    """
    specs: list[TensorSpec] = []
    offset = 0
    for name, shape in named_shapes:
        nbytes = math.prod(shape) * _get_item_bytes(name, dtype)
        specs.append(
            TensorSpec(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes)
        )
        offset = align_offset(offset + nbytes)
    tensors = tuple(specs)
    check_tensors(tensors)
    return tensors


def check_tensors(tensors: Sequence[TensorSpec]) -> int:
    """Return the size of a version of these tensors in bytes, a multiple of ALIGNMENT.

    Raises ManifestError unless names are unique, sizes follow from type and shape, and each tensor
    starts at the first aligned offset after the previous one: no overlap, and no gap in which stale
    bytes could hide.
    """
    if not tensors:
        raise ManifestError("a version needs at least one tensor")
    names: set[str] = set()
    end = 0
    for spec in tensors:
        if spec.name in names:
            raise ManifestError(f"tensor {spec.name!r} is listed twice")
        names.add(spec.name)
        _check_size(spec)
        if spec.offset != end:
            raise ManifestError(f"tensor {spec.name!r} is at offset {spec.offset}, not {end}")
        end = align_offset(end + spec.nbytes)
    return end


def align_offset(offset: int) -> int:
    """Round `offset` up to a multiple of ALIGNMENT."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def count_chunks(manifest: Manifest) -> int:
    """Return the number of chunks in `chunk_bounds`, without building the list."""
    return -(-manifest.total_bytes // manifest.chunk_bytes)


def chunk_bounds(manifest: Manifest) -> list[int]:
    """Return the chunk offsets, then total_bytes: chunk i is bytes [bounds[i], bounds[i + 1]).

    All chunks have chunk_bytes, except for a shorter last one.
    """
    end = manifest.total_bytes
    return [*range(0, end, manifest.chunk_bytes), end]


def have_same_bytes(a: Manifest, b: Manifest) -> bool:
    """Return whether both describe the same bytes; the probes of two publishers may differ."""
    return msgspec.structs.replace(a, probe=None) == msgspec.structs.replace(b, probe=None)


def encode(manifest: Manifest) -> bytes:
    """Encode the manifest as a MessagePack map."""
    return _encoder.encode(manifest)


def decode(data: bytes | bytearray | memoryview) -> Manifest:
    """Decode a manifest; raise ManifestError for any other bytes."""
    return _family.decode(data, MANIFEST_BYTES_MAX)


def _check_size(spec: TensorSpec) -> None:
    # msgspec does not check structs built in Python against their annotations.
    if not all(size >= 1 for size in spec.shape):
        raise ManifestError(f"tensor {spec.name!r} of shape {spec.shape} has no elements")
    wanted = math.prod(spec.shape) * _get_item_bytes(spec.name, spec.dtype)
    if spec.nbytes != wanted:
        raise ManifestError(
            f"tensor {spec.name!r} claims {spec.nbytes} bytes, "
            f"{spec.dtype} of shape {spec.shape} takes {wanted}"
        )


def _get_item_bytes(name: str, dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ManifestError(f"tensor {name!r} has type {dtype!r}, not one of {sorted(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
