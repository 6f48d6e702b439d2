"""A version that arrives as a delta: blocks in, proved chunks out.

Reads   blocks of a predecessor, the base version in its slot
Writes  the slot of the new version
Gives   begin, Rebuild

A delta is only another way to fill a slot. What it leaves there counts chunk by chunk, when a
chunk has the checksum that was published, so a wrong base or a wrong block costs the chunks that
it spoilt and nothing else. The base is pinned until `end`.
"""

from __future__ import annotations

import numpy as np

from laminar.weights.delta.cache import Delta, DeltaCache
from laminar.weights.delta.codec import apply_block
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.table import VersionTable


class Rebuild:
    """One delta on its way into one copy."""

    def __init__(
        self, table: VersionTable, delta: Delta, base: VersionCopy, copy: VersionCopy
    ) -> None:
        """`base` is pinned by the caller; all checksums of `copy` are known."""
        self.delta = delta
        self.next_block = 0
        self._table, self._base, self._copy = table, base, copy
        self._num_checked = 0  #: leading chunks that were looked at

    @property
    def over(self) -> bool:
        """All blocks were applied."""
        return self.next_block == self.delta.num_blocks

    def apply_next(self, checksum: int, payload: bytearray) -> list[int]:
        """Take the next block; indices of the chunks that are proved by it.

        DeltaError if it is not what it claims to be; then nothing was written.
        """
        block = self.delta.make_block(self.next_block, checksum, payload)
        base, out = (np.frombuffer(h.view, np.uint8) for h in (self._base, self._copy))
        self._copy.region.slice_bytes(block.offset, block.offset + block.nbytes).populate_pages()
        apply_block(block, base, out)
        self.next_block += 1
        return self._accept_covered(block.offset + block.nbytes)

    def _accept_covered(self, covered: int) -> list[int]:
        """Prove the chunks that end within the bytes rebuilt so far."""
        copy, first = self._copy, self._num_checked
        last = first
        while last < copy.num_chunks and copy.bounds[last + 1] <= covered:
            last += 1
        self._num_checked = last
        return [index for index in range(first, last) if copy.accept_chunk(index)]

    def release_base(self) -> None:
        """The base is not needed any more."""
        self._table.unpin(self.delta.base)


def begin_rebuild(
    table: VersionTable, cache: DeltaCache, copy: VersionCopy, base: int, base_digest: str
) -> Rebuild | None:
    """Take a version as a delta from version `base`, if that is here and nothing of it is yet.

    All checksums and the digest of `copy` are known.
    """
    if copy.num_have:
        return None
    mine = table.pin(base)
    if mine is None:
        return None
    delta = None
    if mine.complete and mine.digest == base_digest and mine.has_same_size(copy):
        delta = cache.open(copy.draft, base, base_digest)
    if delta is None:
        table.unpin(base)
        return None
    return Rebuild(table, delta, mine, copy)
