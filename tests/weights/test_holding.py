"""One version in one slot: chunks count when proved, and the whole when its digest is right."""

import numpy as np
import pytest

from laminar.weights import manifest as mf
from laminar.weights.hashes import checksums, share_checksums, verify
from laminar.weights.holding import DIGEST_CHUNKS, Holding, pack_have, unpack_have
from laminar.weights.region import Region
from laminar.weights.stock import Stock
from tools.bench.weights_relay import draft

SIZE, CHUNK = 1024, 64
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
SUMS, DIGEST = checksums(DATA, SIZE, CHUNK)
PARTS = tuple(
    mf.Part(rank=rank, offset=start, nbytes=end - start)
    for rank, start, end in ((0, 0, 100), (1, 100, 500), (1, 500, 630), (0, 630, 1024))
)


def arriving(parts: tuple[mf.Part, ...] | None = None) -> Holding:
    slot = Region(memoryview(bytearray(SIZE + 100)))
    return Holding(draft(7, SIZE, CHUNK, parts), 2, slot)


def put(holding: Holding, index: int) -> None:
    start, end = holding.bounds[index], holding.bounds[index + 1]
    holding.chunk(index).view[:] = DATA[start:end].data


def test_chunks_end_where_another_rank_begins() -> None:
    like = draft(7, SIZE, CHUNK, PARTS)
    bounds = mf.chunk_bounds(like)
    assert bounds[:3] == [0, 64, 100] and bounds[-1] == SIZE
    assert 500 not in bounds and 630 in bounds  # both sides of 500 are rank 1's
    assert mf.num_chunks(like) == len(bounds) - 1
    ours, theirs = (mf.chunks_of_ranks(like, [rank]) for rank in (0, 1))
    assert sorted([*ours, *theirs]) == list(range(len(bounds) - 1))
    assert bounds[theirs[0]] == 100 and bounds[theirs[-1] + 1] == 630
    assert mf.chunks_of_ranks(like, [0, 1]) == list(range(len(bounds) - 1))


def test_a_manifest_of_two_ranks_verifies() -> None:
    like = draft(7, SIZE, CHUNK, PARTS)
    sums = share_checksums(DATA, like, [0]) | share_checksums(DATA, like, [1])
    manifest = mf.seal(like, [sums[i] for i in range(len(sums))], DIGEST)
    verify(DATA, manifest)
    assert mf.unseal(manifest) == like
    assert mf.decode(mf.encode(manifest)) == manifest


def test_a_chunk_counts_when_it_has_its_checksum() -> None:
    holding = arriving()
    holding.expect(SUMS, DIGEST)
    assert not holding.accept(3, SUMS[3])  # nothing is in place
    put(holding, 3)
    assert not holding.accept(3, SUMS[3] ^ 1)  # the sender means something else
    assert holding.num_have == 0
    assert holding.accept(3, SUMS[3]) and holding.accept(3)
    assert holding.num_have == 1 and holding.have[3]


def test_unknown_checksums_come_with_the_chunks() -> None:
    holding = arriving()
    for index in reversed(range(holding.num_chunks)):
        assert holding.checksums() == []
        put(holding, index)
        assert holding.accept(index, SUMS[index])
    assert holding.checksums() == SUMS
    assert holding.contradicts([0] * len(SUMS)) and not holding.contradicts(SUMS)


def test_the_digest_waits_for_the_first_gap_and_goes_on_in_small_steps() -> None:
    holding = arriving()
    holding.expect(SUMS, DIGEST)
    for index in range(1, holding.num_chunks):
        put(holding, index)
        assert holding.accept(index)
    assert not holding.digest_step() and holding.computed_digest() is None
    put(holding, 0)
    assert holding.accept(0)
    steps = 1
    while holding.digest_step():
        steps += 1
    assert steps == holding.num_chunks // DIGEST_CHUNKS
    assert holding.computed_digest() == DIGEST
    assert holding.manifest().chunk_checksums == tuple(SUMS)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_have_in_bits(count: int) -> None:
    have = bytes(np.random.default_rng(count).integers(0, 2, count, dtype=np.uint8))
    packed = pack_have(have)
    assert unpack_have(packed, count) == have
    assert unpack_have(packed + b"\0", count) is None
    assert unpack_have(b"", count) is None


def test_what_is_pinned_is_not_forgotten_and_what_is_forgotten_cannot_be_pinned() -> None:
    stock = Stock()
    manifest = mf.seal(draft(7, SIZE, CHUNK), SUMS, DIGEST)
    stock.put(Holding.published(manifest, 0, Region(DATA.data)))
    assert stock.complete() == {7: DIGEST}
    assert stock.pin(7) is not None and stock.pin(7) is not None
    stock.unpin(7)
    assert not stock.forget(7)
    stock.unpin(7)
    assert stock.forget(7)
    assert stock.pin(7) is None and stock.latest() == -1
