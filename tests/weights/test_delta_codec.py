"""Every byte of a version comes back from its delta, and no damaged block writes anything."""

import random
import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from laminar.weights.delta import codec
from laminar.weights.delta.codec import (
    Block,
    DeltaError,
    apply_block,
    compute_block_spans,
    encode_blocks,
    is_worthwhile,
)

STALE = 0xAA  #: what an earlier version left in a slot


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BLOCK_ELEMENTS", 1024)
    monkeypatch.setattr(codec, "_STRIP_ELEMENTS", 256)


def rebuild(blocks: list[Block], base: np.ndarray) -> np.ndarray:
    out = np.full_like(base, STALE)
    for block in blocks:
        apply_block(block, base, out)
    return out


def check_round_trip(base: np.ndarray, new: np.ndarray, itemsize: int) -> list[Block]:
    """Into another slot and into the base's own, in any order."""
    blocks = list(encode_blocks(base, new, itemsize))
    assert [(block.offset, block.nbytes) for block in blocks] == compute_block_spans(
        new.nbytes, itemsize
    )
    assert all(len(block.payload) <= block.nbytes for block in blocks)
    np.testing.assert_array_equal(rebuild(blocks, base), new)
    in_place = base.copy()
    for block in random.Random(1).sample(blocks, len(blocks)):
        apply_block(block, in_place, in_place)
    np.testing.assert_array_equal(in_place, new)
    return blocks


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def nudged(base: np.ndarray, share: float, dtype: str = "<u2") -> np.ndarray:
    """A version whose elements differ from the base in a share of places, by one unit each."""
    new = base.copy()
    elements = new[: new.nbytes - new.nbytes % np.dtype(dtype).itemsize].view(dtype)
    elements[np.random.default_rng(7).random(elements.size) < share] += 1
    return new


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Two versions that share some runs of bytes."""
    size = draw(st.integers(0, 300))
    base = draw(hnp.arrays(np.uint8, size))
    new = base.copy()
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, size))
        run = new[start : start + draw(st.integers(0, size))]
        run[:] = draw(hnp.arrays(np.uint8, run.size))
    return base, new, draw(st.sampled_from([2, 4]))


@settings(max_examples=300, deadline=None)
@given(versions())
def test_any_two_versions(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "BLOCK_ELEMENTS", 32)
        patch.setattr(codec, "_STRIP_ELEMENTS", 8)
        check_round_trip(*pair)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [0, 1, 3, 64, 2048, 4094, 4096, 4097, 8190, 12_345])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.3, 1.0])
@pytest.mark.usefixtures("small_blocks")
def test_sizes_that_end_anywhere(itemsize: int, size: int, share: float) -> None:
    base = noise(size)
    check_round_trip(base, nudged(base, share, f"<u{itemsize}"), itemsize)


@pytest.mark.usefixtures("small_blocks")
def test_every_difference_of_two_bfloat16(itemsize: int = 2) -> None:
    """From zero, from -0.0, from a NaN and from the largest subnormal to all 65,536 patterns."""
    patterns = np.arange(1 << 16, dtype="<u2")
    for start in (0x0000, 0x8000, 0x7FC1, 0x007F):
        base = np.full_like(patterns, start)
        check_round_trip(base.view(np.uint8), patterns.view(np.uint8), itemsize)


def test_float32_patterns() -> None:
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, 3.4e38, 1.0, -1.0]
    values = np.array(special, dtype="<f4").view("<u4")
    near = np.arange(-40_000, 40_000, 7).astype("<u4")  # around the limits of two bytes
    base = np.concatenate([np.repeat(values, values.size), np.full_like(near, 5)])
    new = np.concatenate([np.tile(values, values.size), near + np.uint32(5)])
    check_round_trip(base.view(np.uint8), new.view(np.uint8), 4)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 257, 70_000])
def test_distances_around_the_escape(gap: int) -> None:
    base = noise(300_000)
    new = base.copy()
    new.view("<u2")[::gap] ^= 1
    check_round_trip(base, new, 2)


def test_equal_blocks_cost_nothing() -> None:
    base = noise(2 * 2 * codec.BLOCK_ELEMENTS + 64)
    new = base.copy()
    new[-1] ^= 1
    blocks = check_round_trip(base, new, 2)
    assert [len(block.payload) > 0 for block in blocks] == [False, False, True]


def test_what_cannot_be_coded_goes_as_it_is() -> None:
    base, new = noise(1 << 16, 1), noise(1 << 16, 2)
    (block,) = check_round_trip(base, new, 2)
    assert block.payload == new.tobytes()


def test_one_step_of_small_changes_is_a_hundred_times_smaller() -> None:
    base = noise(4 << 20)
    blocks = check_round_trip(base, nudged(base, 0.007), 2)
    assert sum(len(block.payload) for block in blocks) * 100 < base.nbytes


def test_views_that_are_not_aligned() -> None:
    base, new = np.zeros(4099, np.uint8)[1:], noise(4099)[1:]
    check_round_trip(base, new, 2)


def test_memory_is_that_of_one_block() -> None:
    """Also where everything changed by differences that do not fit; all at once takes 50 blocks."""
    block_bytes = 2 * codec.BLOCK_ELEMENTS
    base = np.zeros(3 * block_bytes, np.uint8)
    new, out = base + 0x40, np.empty_like(base)
    tracemalloc.start()
    try:
        for block in encode_blocks(base, new, 2):
            apply_block(block, base, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(out, new)
    assert peak < 20 * block_bytes


def test_versions_that_have_no_delta() -> None:
    with pytest.raises(DeltaError, match="from a version of 64 bytes to one of 128"):
        list(encode_blocks(noise(64), noise(128), 2))
    with pytest.raises(DeltaError, match=r"no delta for elements of 8 bytes; supported: \[2, 4\]"):
        list(encode_blocks(noise(64), noise(64), 8))


# --- whether it pays ----------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("encoded", "covered", "total", "worth"),
    [
        (0, 8 * MIB, 1000 * MIB, True),
        (10 * MIB, 8 * MIB, 1000 * MIB, True),  # one block says little about the others
        (11 * MIB, 16 * MIB, 1000 * MIB, False),  # above a third of the sample
        (33 * MIB, 100 * MIB, 1000 * MIB, True),
        (34 * MIB, 100 * MIB, 1000 * MIB, False),
        (3 * MIB, 8 * MIB, 9 * MIB, True),
        (3 * MIB + 1, 8 * MIB, 9 * MIB, False),  # the rest cannot bring it below a third
    ],
)
def test_pays(encoded: int, covered: int, total: int, worth: bool) -> None:
    assert is_worthwhile(encoded, covered, total) is worth


# --- damaged and hostile blocks -----------------------------------------------------------------

ELEMENTS = 2000
BASE = np.zeros(2 * ELEMENTS, np.uint8)


def signed(block: Block) -> Block:
    """With the checksum of whatever its payload is now."""
    return block._replace(checksum=xxhash.xxh3_64_intdigest(block.payload))


def forged(body: bytes) -> Block:
    """A block of BASE's size with this body."""
    return signed(Block(0, BASE.nbytes, 2, 0, zstandard.compress(body)))


def body(
    gaps: bytes = b"",
    short: bytes = b"",
    wide_gaps: tuple[int, ...] = (),
    wide_values: tuple[int, ...] = (),
) -> bytes:
    counts = struct.pack("<III", len(gaps), len(wide_gaps), len(wide_values))
    wide = np.array(wide_gaps, "<u4").tobytes() + np.array(wide_values, "<u2").tobytes()
    return counts + gaps + short + wide


def good_block() -> Block:
    (block,) = encode_blocks(BASE, nudged(BASE, 0.1), 2)
    return block


def assert_refused(block: Block, reason: str, out: np.ndarray | None = None) -> None:
    guarded = np.full(BASE.nbytes + 128, STALE, np.uint8)
    target = guarded[64:-64] if out is None else out
    with pytest.raises(DeltaError, match=reason) as caught:
        apply_block(block, BASE, target)
    assert "\n" not in str(caught.value)
    assert (guarded == STALE).all()


def test_a_body_made_by_hand() -> None:
    """The format as the file's header states it: the forged ones differ from this in one thing."""
    block = forged(body(b"\x02\xff", b"\x05\x80", wide_gaps=(300,), wide_values=(0xBEEF,)))
    out = rebuild([block], BASE).view("<u2")
    assert np.flatnonzero(out).tolist() == [2, 303]
    assert out[[2, 303]].tolist() == [5, 0xBEEF]


def test_a_code_as_long_as_what_it_stands_for() -> None:
    """That length means the new bytes themselves, so such a code is not to be sent."""
    elements, found = 300, 0
    for seed in range(500):
        rng = np.random.default_rng(seed)
        new = np.zeros(elements, "<u2")
        where = np.sort(rng.permutation(elements)[: 225 + seed % 40])
        new[where] = rng.integers(0x100, 0xFF00, where.size)  # too far from zero for one byte
        gaps = bytes((np.diff(where, prepend=-1) - 1).astype(np.uint8))
        coded = body(gaps, b"\x80" * where.size, wide_values=tuple(new[where]))
        if len(zstandard.compress(coded, 1)) == new.nbytes:
            found += 1
            check_round_trip(np.zeros(new.nbytes, np.uint8), new.view(np.uint8), 2)
    assert found


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (body(b"\x00", b"")[:-1], "counts do not add up"),
        (body()[:-1], "holds 11 bytes, its counts take 12"),
        (b"", "holds 0 bytes"),
        (body() + b"\x00", "counts do not add up"),
        (struct.pack("<III", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "counts do not add up"),
        (body(b"\x00" * (ELEMENTS + 1), b"\x01" * (ELEMENTS + 1)), "element 2000 of 2000"),
        (body(b"\xff", b"\x01", wide_gaps=(ELEMENTS,)), "element 2000 of 2000"),
        (body(b"\xff" * 3, b"\x01" * 3, (0xFFFFFFFF,) * 3), "element 12884901887 of 2000"),
        (body(b"\xff", b"\x01"), "wide gaps"),
        (body(b"\x00", b"\x01", wide_gaps=(0,)), "wide gaps"),
        (body(b"\x00", b"\x80"), "wide values"),
        (body(b"\x00", b"\x01", wide_values=(7,)), "wide values"),
    ],
)
def test_bodies_that_lie(payload: bytes, reason: str) -> None:
    assert_refused(forged(payload), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checksum": 0}, "not match its checksum"),
        ({"offset": -2}, "lies outside a version of 4000 bytes"),
        ({"offset": 2}, "lies outside"),
        ({"offset": 1 << 70}, "lies outside"),
        ({"nbytes": 0}, "lies outside"),
        ({"nbytes": -4000}, "lies outside"),
        ({"nbytes": 4002}, "lies outside"),
        ({"offset": 1, "nbytes": 3998}, "does not start at an element of 2 bytes"),
        ({"itemsize": 4}, "add up|wide"),
        ({"itemsize": 8}, "no delta"),
        ({"itemsize": 0}, "no delta"),
    ],
)
def test_places_and_sizes_that_do_not_fit(change: dict[str, int], reason: str) -> None:
    assert_refused(good_block()._replace(**change), reason)


def test_out_smaller_than_base() -> None:
    assert_refused(good_block(), "version of 3998 bytes", out=BASE[:-2].copy())


def test_a_block_larger_than_blocks_are() -> None:
    size = 2 * codec.BLOCK_ELEMENTS + 2
    view = np.zeros(size, np.uint8)
    with pytest.raises(DeltaError, match="lies outside"):
        apply_block(signed(Block(0, size, 2, 0, b"")), view, view)


def frames() -> Iterator[tuple[bytes, str]]:
    good = bytes(good_block().payload)
    yield good[:-1], "not a zstd frame"
    yield good + b"\x00", "not a zstd frame"
    yield b"no frame at all", "not a zstd frame"
    huge = zstandard.ZstdCompressor().compressobj(size=1 << 60)
    yield huge.compress(b"\x00") + huge.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), "frame states"
    unknown = zstandard.ZstdCompressor(write_content_size=False)
    yield unknown.compress(body()), "frame states -1 bytes"
    yield zstandard.compress(bytes(8041)), "frame states 8041 bytes, the limit is 8040"


@pytest.mark.parametrize(("payload", "reason"), list(frames()))
def test_frames_that_lie(payload: bytes, reason: str) -> None:
    """A frame that states 2 ** 60 bytes is refused before any of them is reserved."""
    assert_refused(signed(good_block()._replace(payload=payload)), reason)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_refused_or_stays_inside(data: st.DataObject) -> None:
    """Bytes changed with a right checksum, in the frame or in the body below it."""
    inner = bytearray(zstandard.decompress(bytes(good_block().payload)))
    outer = bytearray(good_block().payload)
    damaged = data.draw(st.sampled_from([inner, outer]))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    payload = zstandard.compress(bytes(inner)) if damaged is inner else bytes(outer)
    guarded = np.full(BASE.nbytes + 128, STALE, np.uint8)
    try:
        apply_block(signed(good_block()._replace(payload=payload)), BASE, guarded[64:-64])
    except DeltaError:
        assert (guarded == STALE).all()
    assert (guarded[:64] == STALE).all() and (guarded[-64:] == STALE).all()
