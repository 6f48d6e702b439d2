"""One version in one slot: chunks count when proved, and the whole when its digest is right."""

from contextlib import nullcontext

import numpy as np
import pytest

from laminar.weights.arena.region import Region
from laminar.weights.version.copy import DIGEST_CHUNKS, VersionCopy, pack_have, unpack_have
from laminar.weights.version.hashes import compute_checksums
from laminar.weights.version.table import VersionTable
from tools.bench.weights.relay_process import describe

SIZE, CHUNK = 1024, 64
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
SUMS, DIGEST = compute_checksums(DATA, SIZE, CHUNK)


def arriving() -> VersionCopy:
    slot = Region(memoryview(bytearray(SIZE + 100)))
    return VersionCopy(describe(7, DATA, CHUNK), 2, slot)


def put(copy: VersionCopy, index: int) -> None:
    start, end = copy.bounds[index], copy.bounds[index + 1]
    copy.get_chunk(index).view[:] = DATA[start:end].data


def test_a_chunk_counts_when_it_has_its_checksum() -> None:
    copy = arriving()
    assert not copy.accept_chunk(3, SUMS[3])  # nothing is in place
    put(copy, 3)
    assert not copy.accept_chunk(3, SUMS[3] ^ 1)  # the sender means something else
    assert copy.num_have == 0
    assert copy.accept_chunk(3, SUMS[3]) and copy.accept_chunk(3)
    assert copy.num_have == 1 and copy.have[3]


def test_the_digest_waits_for_the_first_gap_and_goes_on_in_small_steps() -> None:
    copy = arriving()
    for index in range(1, copy.num_chunks):
        put(copy, index)
        assert copy.accept_chunk(index)
    assert not copy.digest_step() and copy.get_computed_digest() is None
    put(copy, 0)
    assert copy.accept_chunk(0)
    steps = 1
    while copy.digest_step():
        steps += 1
    assert steps == copy.num_chunks // DIGEST_CHUNKS
    assert copy.get_computed_digest() == DIGEST
    assert copy.get_manifest().chunk_checksums == tuple(SUMS)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_have_in_bits(count: int) -> None:
    have = bytes(np.random.default_rng(count).integers(0, 2, count, dtype=np.uint8))
    packed = pack_have(have)
    assert unpack_have(packed, count) == have
    assert unpack_have(packed + b"\0", count) is None
    assert unpack_have(b"", count) is None


def test_what_is_pinned_is_not_forgotten_and_what_is_forgotten_cannot_be_pinned() -> None:
    table = VersionTable(nullcontext())
    table.put(VersionCopy(describe(7, DATA, CHUNK), 0, Region(DATA.data), complete=True))
    assert table.get_complete_digests() == {7: DIGEST}
    assert table.pin(7) is not None and table.pin(7) is not None
    table.unpin(7)
    assert not table.try_forget(7)
    table.unpin(7)
    assert table.try_forget(7)
    assert table.pin(7) is None and table.get_latest() == -1
