"""Rebuild of a version from a delta: blocks in, verified chunks out.

Reads   blocks of a predecessor, the base version in its slot
Writes  the slot of the new version
Gives   begin_rebuild, Rebuild

A delta is only another way to fill a slot. A rebuilt chunk counts once it has the published
checksum, so a wrong base or block costs only the chunks that it spoilt. The base stays pinned until
`release_base`.
"""

from __future__ import annotations

import numpy as np

from laminar.weights.delta.cache import Delta, DeltaCache
from laminar.weights.delta.codec import apply_block
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.table import VersionTable


class Rebuild:
    """A delta that is being applied to a copy."""

    def __init__(
        self, table: VersionTable, delta: Delta, base: VersionCopy, copy: VersionCopy
    ) -> None:
        """Begin with a `base` that the caller pinned; all checksums of `copy` are known."""
        self.delta = delta
        self.next_block = 0
        self._table, self._base, self._copy = table, base, copy
        self._num_checked = 0  #: number of leading chunks checked

    @property
    def over(self) -> bool:
        """Whether all blocks were applied."""
        return self.next_block == self.delta.num_blocks

    def apply_next(self, checksum: int, payload: bytearray) -> list[int]:
        """Apply the next block and return the indices of the chunks that it completes.

        Raises DeltaError, before anything is written, for an invalid block.
        """
        block = self.delta.make_block(self.next_block, checksum, payload)
        base, out = (np.frombuffer(h.view, np.uint8) for h in (self._base, self._copy))
        self._copy.region.slice_bytes(block.offset, block.offset + block.nbytes).populate_pages()
        apply_block(block, base, out)
        self.next_block += 1
        return self._accept_covered(block.offset + block.nbytes)

    def _accept_covered(self, covered: int) -> list[int]:
        """Verify the chunks that end within the bytes rebuilt so far; return the valid ones."""
        copy, first = self._copy, self._num_checked
        last = first
        while last < copy.num_chunks and copy.bounds[last + 1] <= covered:
            last += 1
        self._num_checked = last
        return [index for index in range(first, last) if copy.accept_chunk(index)]

    def release_base(self) -> None:
        """Unpin the base."""
        self._table.unpin(self.delta.base)


def begin_rebuild(
    table: VersionTable, cache: DeltaCache, copy: VersionCopy, base: int, base_digest: str
) -> Rebuild | None:
    """Begin to rebuild `copy` from version `base`, if that is held and `copy` is still empty.

    All checksums and the digest of `copy` are known.
    """
    if copy.num_have:
        return None
    mine = table.pin(base)
    if mine is None:
        return None
    delta = None
    if mine.complete and mine.digest == base_digest and mine.has_same_size(copy):
        delta = cache.open(copy.get_manifest(), base, base_digest)
    if delta is None:
        table.unpin(base)
        return None
    return Rebuild(table, delta, mine, copy)
