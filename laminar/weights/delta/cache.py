"""Encoded deltas of a relay: kept so that they go on to the successor as they came.

Reads   two copies (to encode), blocks from a predecessor
Gives   Delta, DeltaCache, encode

A delta is encoded once, where the version was published; every other relay forwards the very
blocks, each as soon as it is here. Blocks lie one after the other at fixed places of the version,
so a block's number says where it belongs. What a relay keeps is bounded: a delta that would go over
the limit, or that is not smaller, is given up, and the version goes out whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from laminar.weights.delta.codec import Block, compute_block_spans, encode_blocks, is_worthwhile
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.manifest import ITEM_BYTES, Draft

ITEM_SIZES = (2, 4)
"""Bytes of an element for which there is a delta."""


class Delta:
    """The blocks that turn `base` into `version`, as many of them as are here."""

    def __init__(self, draft: Draft, base: int, base_digest: str) -> None:
        self.version = draft.version
        self.base, self.base_digest = base, base_digest
        self.itemsize = ITEM_BYTES[draft.dtype]
        self.total_bytes = draft.total_bytes
        self._spans = compute_block_spans(draft.total_bytes, self.itemsize)
        self.payloads: list[bytes | bytearray] = []
        self.checksums: list[int] = []
        self.num_bytes = 0
        self.given_up = False

    @property
    def num_blocks(self) -> int:
        return len(self._spans)

    @property
    def num_here(self) -> int:
        """Leading blocks that are here."""
        return len(self.payloads)

    def make_block(self, position: int, checksum: int, payload: bytes | bytearray) -> Block:
        """What a payload with this number stands for."""
        return Block(*self._spans[position], self.itemsize, checksum, payload)


class DeltaCache:
    """The deltas of one relay, within a limit; owned by the plane's thread."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of payloads kept; 0: no deltas at all."""
        self._max_bytes = max_bytes
        self._deltas: dict[tuple[int, int], Delta] = {}  #: by (version, base)

    @property
    def num_bytes(self) -> int:
        return sum(delta.num_bytes for delta in self._deltas.values())

    def open(self, draft: Draft, base: int, base_digest: str) -> Delta | None:
        """A delta to be filled; None if deltas are off, or this one was given up before.

        Deltas of older versions go: those are not offered any more, except to one that is in the
        middle of it and keeps it alive.
        """
        key = (draft.version, base)
        if not self._max_bytes or ITEM_BYTES[draft.dtype] not in ITEM_SIZES or key in self._deltas:
            return None
        for old in [version for version in self._deltas if version[0] < draft.version]:
            del self._deltas[old]
        self._deltas[key] = Delta(draft, base, base_digest)
        return self._deltas[key]

    def find_delta(self, version: int, held: dict[int, str]) -> Delta | None:
        """A delta to this version from one of those in `held`, by version and digest."""
        for (to, base), delta in self._deltas.items():
            if to == version and not delta.given_up and held.get(base) == delta.base_digest:
                return delta
        return None

    def add(self, delta: Delta, checksum: int, payload: bytes | bytearray) -> None:
        """The next block of a delta; gives it up when that is too much."""
        if delta.given_up:
            return
        if self.num_bytes + len(payload) > self._max_bytes:
            self.give_up(delta)
            return
        delta.payloads.append(payload)
        delta.checksums.append(checksum)
        delta.num_bytes += len(payload)

    def give_up(self, delta: Delta) -> None:
        """A delta will not be completed. It stays as a mark, so that it is not begun again."""
        delta.given_up = True
        delta.payloads, delta.checksums, delta.num_bytes = [], [], 0


def encode_delta(
    base: VersionCopy,
    new: VersionCopy,
    delta: Delta,
    on_block: Callable[[Block], None],
    on_end: Callable[[bool], None],
) -> None:
    """Encode, which takes seconds for gigabytes; both copies must stay pinned until `on_end`.

    `on_end(False)`: it is not smaller, or was given up.
    """
    complete = False
    try:
        complete = _encode_blocks(base, new, delta, on_block)
    finally:
        on_end(complete)


def _encode_blocks(
    base: VersionCopy, new: VersionCopy, delta: Delta, on_block: Callable[[Block], None]
) -> bool:
    """Encode for as long as it is smaller and the delta is not given up; whether all of it is
    done."""
    encoded = 0
    old_bytes, new_bytes = (np.frombuffer(copy.view, np.uint8) for copy in (base, new))
    for block in encode_blocks(old_bytes, new_bytes, delta.itemsize):
        encoded += len(block.payload)
        covered = block.offset + block.nbytes
        if delta.given_up or not is_worthwhile(encoded, covered, delta.total_bytes):
            return False
        on_block(block)
    return True
