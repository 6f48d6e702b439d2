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

from laminar.weights.delta import apply_block
from laminar.weights.deltas import Delta, DeltaBook
from laminar.weights.holding import Holding
from laminar.weights.stock import Stock
from laminar.weights.wire import Offer


class Rebuild:
    """One delta on its way into one holding."""

    def __init__(self, stock: Stock, delta: Delta, base: Holding, holding: Holding) -> None:
        """`base` is pinned by the caller; all checksums of `holding` are known."""
        self.delta = delta
        self.next_block = 0
        self._stock, self._base, self._holding = stock, base, holding
        self._num_checked = 0  #: leading chunks that were looked at

    @property
    def over(self) -> bool:
        """All blocks were applied."""
        return self.next_block == self.delta.num_blocks

    def apply(self, checksum: int, payload: bytearray) -> list[int]:
        """Take the next block; indices of the chunks that are proved by it.

        DeltaError if it is not what it claims to be; then nothing was written.
        """
        block = self.delta.block(self.next_block, checksum, payload)
        base, out = (np.frombuffer(h.view, np.uint8) for h in (self._base, self._holding))
        self._holding.region.part(block.offset, block.offset + block.nbytes).prepare()
        apply_block(block, base, out)
        self.next_block += 1
        return self._check(block.offset + block.nbytes)

    def _check(self, covered: int) -> list[int]:
        """Prove the chunks that end within the bytes rebuilt so far."""
        holding, first = self._holding, self._num_checked
        last = first
        while last < holding.num_chunks and holding.bounds[last + 1] <= covered:
            last += 1
        self._num_checked = last
        return [index for index in range(first, last) if holding.accept(index)]

    def end(self) -> None:
        """The base is not needed any more."""
        self._stock.unpin(self.delta.base)


def begin(stock: Stock, book: DeltaBook, holding: Holding, offer: Offer) -> Rebuild | None:
    """Take an offered version as a delta, if its base is here and nothing of it is yet."""
    base = offer.base
    if base is None or holding.num_have or not (offer.checksums and offer.digest):
        return None
    mine = stock.pin(base.version)
    if mine is None:
        return None
    delta = None
    if mine.complete and mine.digest == base.digest and mine.same_size(holding):
        delta = book.open(holding.draft, base.version, base.digest)
    if delta is None:
        stock.unpin(base.version)
        return None
    return Rebuild(stock, delta, mine, holding)
