"""A relay's copy of a version in a slot, with the state of its chunks.

Reads   a slot, checksums of chunks
Gives   VersionCopy

A chunk counts as present once its bytes have their checksum. The digest of the whole is computed in
order during the transfer, mostly while a chunk is still in the cache; a version is complete when
that digest is the published one. A copy is owned by one thread, except that other threads may read
`complete`, `digest` and `front`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import xxhash

from laminar.weights.arena.region import Region
from laminar.weights.version.manifest import Manifest, chunk_bounds

DIGEST_CHUNKS = 4
"""Maximum chunks hashed per step, so that a backlog never keeps the thread from its sockets."""


_numbers = count()


class VersionCopy:
    """A version, complete or in transfer, and the place of its bytes."""

    def __init__(
        self, manifest: Manifest, slot: int, region: Region, *, complete: bool = False
    ) -> None:
        """Begin a copy in the `region` of a slot, which has at least total_bytes.

        `complete`: a trainer of this machine wrote the whole version; else nothing is there yet.
        """
        #: number unique in this process; a version that arrives a second time is another copy
        self.number = next(_numbers)
        self._manifest = manifest
        self.slot = slot
        self.region = region.slice_bytes(0, manifest.total_bytes)
        self.bounds = chunk_bounds(manifest)
        self.num_chunks = len(self.bounds) - 1
        #: 1 where a chunk is present and verified
        self.have = bytearray([complete]) * self.num_chunks
        self.num_have = sum(self.have)
        self.complete = complete  #: verified as a whole
        self._hasher = xxhash.xxh3_128()
        self._num_hashed = 0

    @property
    def version(self) -> int:
        return self._manifest.version

    @property
    def digest(self) -> str:
        """The published digest."""
        return self._manifest.digest

    def get_manifest(self) -> Manifest:
        return self._manifest

    def has_same_size(self, other: VersionCopy) -> bool:
        """Return whether size and type are equal, as a delta between the two needs."""
        mine, theirs = self._manifest, other.get_manifest()
        return (mine.total_bytes, mine.dtype) == (theirs.total_bytes, theirs.dtype)

    @property
    def front(self) -> int:
        """The number of leading bytes that are present and verified; thread-safe."""
        lacking = self.have.find(0)
        return self.bounds[lacking] if lacking >= 0 else self.bounds[-1]

    @property
    def view(self) -> memoryview:
        return self.region.view

    def get_chunk(self, index: int) -> Region:
        return self.region.slice_bytes(self.bounds[index], self.bounds[index + 1])

    def get_checksum(self, index: int) -> int:
        return self._manifest.chunk_checksums[index]

    def accept_chunk(self, index: int, checksum: int | None = None) -> bool:
        """Verify a chunk whose bytes are in place; return whether it counts from now on.

        `checksum` is the sender's claim, which must equal the published one.
        """
        wanted = self.get_checksum(index)
        found = xxhash.xxh3_64_intdigest(self.get_chunk(index).view)
        if found != wanted or (checksum is not None and checksum != wanted):
            return False
        self.num_have += not self.have[index]
        self.have[index] = 1
        return True

    def digest_step(self) -> bool:
        """Hash a few more of the leading chunks; return whether more can be hashed now."""
        end = min(self._num_hashed + DIGEST_CHUNKS, self.num_chunks)
        while self._num_hashed < end and self.have[self._num_hashed]:
            self._hasher.update(self.get_chunk(self._num_hashed).view)
            self._num_hashed += 1
        return self._num_hashed < self.num_chunks and bool(self.have[self._num_hashed])

    def get_computed_digest(self) -> str | None:
        """Return the xxh3_128 of the version, or None until all chunks are hashed."""
        return self._hasher.hexdigest() if self._num_hashed == self.num_chunks else None


def pack_have(have: Sequence[int]) -> bytes:
    """Pack the flags of all chunks into bits."""
    return np.packbits(np.frombuffer(bytes(have), np.uint8)).tobytes()


def unpack_have(packed: bytes, num_chunks: int) -> bytearray | None:
    """Unpack bits into one byte per chunk, 0 or 1; None if the length does not match."""
    if len(packed) != -(-num_chunks // 8):
        return None
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=num_chunks)
    return bytearray(bits.tobytes())
