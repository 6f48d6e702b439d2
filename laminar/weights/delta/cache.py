"""The encoded deltas of a relay, cached to be forwarded to the successor unchanged.

Reads   two copies (to encode), blocks from a predecessor
Gives   Delta, DeltaCache, encode_delta

A delta is encoded once, where the version was published. Every other relay forwards the same
blocks, each as soon as it arrives. Blocks cover consecutive fixed spans of the version, so a
block's number determines its place. The cache is bounded: a delta that would exceed the limit, or
that does not save enough, is given up, and the version is sent whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from laminar.weights.delta.codec import Block, compute_block_spans, encode_blocks, is_worthwhile
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.manifest import ITEM_BYTES, Manifest

ITEM_SIZES = (2, 4)  #: element sizes, in bytes, for which deltas are supported


class Delta:
    """The blocks present so far of the delta that turns `base` into `version`."""

    def __init__(self, manifest: Manifest, base: int, base_digest: str) -> None:
        self.version = manifest.version
        self.base, self.base_digest = base, base_digest
        self.itemsize = ITEM_BYTES[manifest.dtype]
        self.total_bytes = manifest.total_bytes
        self._spans = compute_block_spans(manifest.total_bytes, self.itemsize)
        self.payloads: list[bytes | bytearray] = []
        self.checksums: list[int] = []
        self.num_bytes = 0
        self.given_up = False

    @property
    def num_blocks(self) -> int:
        return len(self._spans)

    @property
    def num_here(self) -> int:
        """The number of leading blocks that are present."""
        return len(self.payloads)

    def make_block(self, position: int, checksum: int, payload: bytes | bytearray) -> Block:
        """Build the block at this position from its payload."""
        return Block(*self._spans[position], self.itemsize, checksum, payload)


class DeltaCache:
    """The deltas of a relay, within a size limit; owned by the plane's thread."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache for `max_bytes` of payloads; 0 turns deltas off."""
        self._max_bytes = max_bytes
        self._deltas: dict[tuple[int, int], Delta] = {}  #: by (version, base)

    @property
    def num_bytes(self) -> int:
        return sum(delta.num_bytes for delta in self._deltas.values())

    def open(self, manifest: Manifest, base: int, base_digest: str) -> Delta | None:
        """Add and return an empty delta; None if deltas are off or this one was given up before.

        Drops the deltas of older versions, which are not offered any more; a transfer in progress
        keeps its own delta alive.
        """
        key = (manifest.version, base)
        itemsize = ITEM_BYTES[manifest.dtype]
        if not self._max_bytes or itemsize not in ITEM_SIZES or key in self._deltas:
            return None
        for old in [version for version in self._deltas if version[0] < manifest.version]:
            del self._deltas[old]
        self._deltas[key] = Delta(manifest, base, base_digest)
        return self._deltas[key]

    def find_delta(self, version: int, held: dict[int, str]) -> Delta | None:
        """Return a delta to `version` from a version in `held` (version to digest), if any."""
        for (to, base), delta in self._deltas.items():
            if to == version and not delta.given_up and held.get(base) == delta.base_digest:
                return delta
        return None

    def add(self, delta: Delta, checksum: int, payload: bytes | bytearray) -> None:
        """Append the next block to a delta; give the delta up if that exceeds the limit."""
        if delta.given_up:
            return
        if self.num_bytes + len(payload) > self._max_bytes:
            self.give_up(delta)
            return
        delta.payloads.append(payload)
        delta.checksums.append(checksum)
        delta.num_bytes += len(payload)

    def give_up(self, delta: Delta) -> None:
        """Abandon a delta and free its blocks; its entry stays, so that it is not begun again."""
        delta.given_up = True
        delta.payloads, delta.checksums, delta.num_bytes = [], [], 0


def encode_delta(
    base: VersionCopy,
    new: VersionCopy,
    delta: Delta,
    on_block: Callable[[Block], None],
    on_end: Callable[[bool], None],
) -> None:
    """Encode a delta, which takes seconds for gigabytes; both copies stay pinned until `on_end`.

    `on_end(False)` reports that the delta does not save enough, or was given up.
    """
    complete = False
    try:
        complete = _encode_blocks(base, new, delta, on_block)
    finally:
        on_end(complete)


def _encode_blocks(
    base: VersionCopy, new: VersionCopy, delta: Delta, on_block: Callable[[Block], None]
) -> bool:
    """Encode while the delta is worthwhile and not given up; return whether all is encoded."""
    encoded = 0
    old_bytes, new_bytes = (np.frombuffer(copy.view, np.uint8) for copy in (base, new))
    for block in encode_blocks(old_bytes, new_bytes, delta.itemsize):
        encoded += len(block.payload)
        covered = block.offset + block.nbytes
        if delta.given_up or not is_worthwhile(encoded, covered, delta.total_bytes):
            return False
        on_block(block)
    return True
