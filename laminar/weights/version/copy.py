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
from laminar.weights.version.manifest import (
    Draft,
    Manifest,
    chunk_bounds,
    is_same_layout,
    seal_draft,
    unseal_manifest,
)

DIGEST_CHUNKS = 4
"""Maximum chunks hashed per step, so that a backlog never keeps the thread from its sockets."""


_numbers = count()


class VersionCopy:
    """A version, complete or in transfer, and the place of its bytes."""

    def __init__(
        self, draft: Draft, slot: int, region: Region, checksums: Sequence[int], digest: str
    ) -> None:
        """Begin an empty copy in the `region` of a slot, which has at least total_bytes.

        `checksums` of the chunks and `digest` are the published ones.
        """
        #: number unique in this process; a version that arrives a second time is another copy
        self.number = next(_numbers)
        self.draft = draft
        self.slot = slot
        self.region = region.slice_bytes(0, draft.total_bytes)
        self.bounds = chunk_bounds(draft)
        self.num_chunks = len(self.bounds) - 1
        self.have = bytearray(self.num_chunks)  #: 1 where a chunk is present and verified
        self.num_have = 0
        self.digest = digest
        self.complete = False  #: verified as a whole
        self._checksums = list(checksums)
        self._hasher = xxhash.xxh3_128()
        self._num_hashed = 0
        self._manifest: Manifest | None = None

    @classmethod
    def from_manifest(cls, manifest: Manifest, slot: int, region: Region) -> VersionCopy:
        """Create the copy of a whole version that a trainer of this machine wrote."""
        draft = unseal_manifest(manifest)
        copy = cls(draft, slot, region, manifest.chunk_checksums, manifest.digest)
        copy.have = bytearray(b"\1" * copy.num_chunks)
        copy.num_have = copy.num_chunks
        copy.complete = True
        copy._manifest = manifest
        return copy

    @property
    def version(self) -> int:
        return self.draft.version

    def is_consistent_with(self, draft: Draft, checksums: Sequence[int], digest: str) -> bool:
        """Return whether another process's description of this version is of the same bytes."""
        same_hashes = (self._checksums, self.digest) == (list(checksums), digest)
        return same_hashes and is_same_layout(self.draft, draft)

    def has_same_size(self, other: VersionCopy) -> bool:
        """Return whether size and type are equal, as a delta between the two needs."""
        mine, theirs = self.draft, other.draft
        return (mine.total_bytes, mine.dtype) == (theirs.total_bytes, theirs.dtype)

    @property
    def front(self) -> int:
        """The number of leading bytes that are present and verified; thread-safe."""
        lacking = self.have.find(0)
        return self.bounds[lacking] if lacking >= 0 else self.draft.total_bytes

    @property
    def view(self) -> memoryview:
        return self.region.view

    def get_chunk(self, index: int) -> Region:
        return self.region.slice_bytes(self.bounds[index], self.bounds[index + 1])

    def get_checksum(self, index: int) -> int:
        return self._checksums[index]

    def get_checksums(self) -> list[int]:
        return list(self._checksums)

    def accept_chunk(self, index: int, checksum: int | None = None) -> bool:
        """Verify a chunk whose bytes are in place; return whether it counts from now on.

        `checksum` is the sender's claim, which must equal the published one.
        """
        wanted = self._checksums[index]
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

    def get_manifest(self) -> Manifest:
        """Return the manifest of a complete version."""
        if self._manifest is None:
            self._manifest = seal_draft(self.draft, self.get_checksums(), self.digest)
        return self._manifest


def pack_have(have: Sequence[int]) -> bytes:
    """Pack the flags of all chunks into bits."""
    return np.packbits(np.frombuffer(bytes(have), np.uint8)).tobytes()


def unpack_have(packed: bytes, num_chunks: int) -> bytearray | None:
    """Unpack bits into one byte per chunk, 0 or 1; None if the length does not match."""
    if len(packed) != -(-num_chunks // 8):
        return None
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=num_chunks)
    return bytearray(bits.tobytes())
