"""Lossless deltas between a version that a receiver holds and the next one.

Reads   the bytes of a base version and of a new one, uint8 views of equal size
Writes  the receiver's slot: the base with the differences applied
Gives   Block, compute_block_spans, encode_blocks, apply_block, is_worthwhile; DeltaError

An RL step changes few 16-bit weights, and those mostly by one unit in the last place. So a block
stores for each changed element its distance from the previous changed one and the difference of the
two bit patterns, a byte each, and leaves the rest to zstd. Values that do not fit use an escape, so
every bit pattern is restored exactly. 32-bit elements have two bytes of difference; a step changes
nearly all of them, so their deltas are seldom smaller. Blocks are independent: encoding, sending,
forwarding and applying overlap.

A block's checksum covers its payload only. The digest of the rebuilt version proves the block's
place and that both sides used the same base. Payload of a block, little-endian:

    empty                            nothing differs
    as long as the part it covers    the new bytes themselves, when coding would not be shorter
    else a zstd frame of
        u32 x 3                      changed elements, wide gaps, wide values
        u8 [changed]                 equal elements since the last changed one; 255: wide
        i8 or i16 [changed]          new - base as integers; the smallest value: wide
        u32 [wide gaps]              gaps of 255 and more
        u16 or u32 [wide values]     new elements whose difference does not fit
        rest                         bytes behind the last whole element, as they are
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

Bytes = npt.NDArray[np.uint8]  #: uint8 [n], contiguous

BLOCK_ELEMENTS = 4 << 20
"""Large enough that zstd and numpy work at full speed, small enough to hide behind the wire."""
SAMPLE_BYTES = 32 << 20
"""Bytes of a version to encode before the size of the delta is judged (see `is_worthwhile`)."""
_STRIP_ELEMENTS = 1 << 18
"""Elements compared at once, so that the result of the comparison stays in the L2 cache."""
_MIN_RATIO = 3
"""Minimum ratio of version size to delta size; below it, the version is sent whole."""
_ZSTD_LEVEL = 1
_COUNTS = struct.Struct("<III")
_WIDE_GAP = 255


class DeltaError(ValueError):
    """Versions that have no delta, or a block that does not fit them."""


class Block(NamedTuple):
    """The differences in one span of a version; the checksum covers the payload only."""

    offset: int  #: bytes from the start of the version, a multiple of itemsize
    nbytes: int  #: bytes of the version that are covered, at most BLOCK_ELEMENTS elements
    itemsize: int  #: bytes of one element, 2 or 4
    checksum: int  #: xxh3_64 of the payload
    payload: bytes | bytearray | memoryview  #: at most nbytes


class _ElementTypes(NamedTuple):
    """The types in which elements of one size and their differences are stored."""

    bits: np.dtype[np.unsignedinteger]  #: type of an element
    signed: np.dtype[np.signedinteger]  #: type of the difference of two elements, modulo 2 ** bits
    short: np.dtype[np.signedinteger]  #: type of the difference as stored
    escape: int  #: smallest value of `short`: the element itself is among the wide values


_ELEMENT_TYPES = {
    2: _ElementTypes(np.dtype("<u2"), np.dtype("<i2"), np.dtype("<i1"), -(1 << 7)),
    4: _ElementTypes(np.dtype("<u4"), np.dtype("<i4"), np.dtype("<i2"), -(1 << 15)),
}


class _Patch(NamedTuple):
    """A decoded block: the changes from its part of the base to the new version."""

    where: npt.NDArray[np.int64]  #: [changed], element indices within the block, ascending
    short: npt.NDArray[np.signedinteger]  #: [changed], differences
    wide: npt.NDArray[np.unsignedinteger]  #: [wide values], new elements
    rest: npt.NDArray[np.uint8]  #: bytes behind the last whole element


def compute_block_spans(total_bytes: int, itemsize: int) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of each block; raise DeltaError for unsupported element sizes."""
    size = BLOCK_ELEMENTS * _get_element_types(itemsize).bits.itemsize
    return [(start, min(size, total_bytes - start)) for start in range(0, total_bytes, size)]


def encode_blocks(base: Bytes, new: Bytes, itemsize: int) -> Iterator[Block]:
    """Yield the blocks that turn `base` into `new`, one per span, in order.

    Blocks are encoded lazily. The memory use depends on the size of a block and not of the version:
    little for a few changes, some 16 times the block's size if everything changed. Both views must
    stay unchanged until the last block. Raises DeltaError at the first block if the versions differ
    in size or elements do not have 2 or 4 bytes.
    """
    if base.nbytes != new.nbytes:
        raise DeltaError(f"no delta from a version of {base.nbytes} bytes to one of {new.nbytes}")
    code = _get_element_types(itemsize)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    for offset, nbytes in compute_block_spans(new.nbytes, itemsize):
        part = new[offset : offset + nbytes]
        body = _encode(base[offset : offset + nbytes], part, code)
        payload = compressor.compress(body) if body else b""
        if len(payload) >= nbytes:
            payload = part.tobytes()
        checksum = xxhash.xxh3_64_intdigest(payload)
        yield Block(offset, nbytes, itemsize, checksum, payload)


def apply_block(block: Block, base: Bytes, out: Bytes) -> None:
    """Write the block's part of the new version into `out`; both views are whole versions.

    `out` may be `base` itself. Raises DeltaError, before anything is written, for a block that is
    damaged, inconsistent or outside the views.
    """
    code = _get_element_types(block.itemsize)
    _check_place(block, min(base.nbytes, out.nbytes))
    if xxhash.xxh3_64_intdigest(block.payload) != block.checksum:
        raise _make_damage_error(block, "its payload does not match its checksum")
    source = base[block.offset : block.offset + block.nbytes]
    target = out[block.offset : block.offset + block.nbytes]
    size = memoryview(block.payload).nbytes
    if size == block.nbytes:
        np.copyto(target, np.frombuffer(block.payload, np.uint8))
    elif size == 0:
        np.copyto(target, source)
    else:
        _apply_patch(_decode(block, code), code, source, target)


def is_worthwhile(encoded_bytes: int, covered_bytes: int, total_bytes: int) -> bool:
    """Return whether to continue with the delta rather than send the whole version.

    Called after each block: `encoded_bytes` is the size of the payloads so far, `covered_bytes` of
    the parts that they cover, `total_bytes` of the version. A version that changed everywhere fails
    after a block or two; SAMPLE_BYTES allows for one that changed much only at its beginning.
    """
    allowance = min(total_bytes, max(covered_bytes, SAMPLE_BYTES))
    return encoded_bytes * _MIN_RATIO <= allowance


def _encode(base: Bytes, new: Bytes, code: _ElementTypes) -> bytes:
    """Return the uncompressed body of a block; empty if the parts are equal."""
    whole = new.nbytes - new.nbytes % code.bits.itemsize
    rest = new[whole:]
    old, now = base[:whole].view(code.bits), new[:whole].view(code.bits)
    where = _find_changed(old, now)
    if where.size == 0 and np.array_equal(base[whole:], rest):
        return b""
    gaps = np.diff(where, prepend=np.int32(-1)) - 1
    values = now[where]
    differences = (values - old[where]).view(code.signed)
    short = differences.astype(code.short)
    wide = (short != differences) | (short == code.escape)
    short[wide] = code.escape
    wide_gaps, wide_values = gaps[gaps >= _WIDE_GAP].astype("<u4"), values[wide]
    arrays = (np.minimum(gaps, _WIDE_GAP).astype(np.uint8), short, wide_gaps, wide_values, rest)
    counts = _COUNTS.pack(where.size, wide_gaps.size, wide_values.size)
    return b"".join((counts, *(array.tobytes() for array in arrays)))


def _find_changed(
    old: npt.NDArray[np.unsignedinteger], now: npt.NDArray[np.unsignedinteger]
) -> npt.NDArray[np.int32]:
    """Return the indices of the elements that differ, ascending."""
    found = [np.empty(0, np.int32)]
    for start in range(0, now.size, _STRIP_ELEMENTS):
        strip = slice(start, start + _STRIP_ELEMENTS)
        found.append((np.flatnonzero(old[strip] != now[strip]) + start).astype(np.int32))
    return np.concatenate(found)


def _decode(block: Block, code: _ElementTypes) -> _Patch:
    """Decode a compressed payload, checked against the part that it claims to cover."""
    body = _decompress_body(block, code)
    if len(body) < _COUNTS.size:
        raise _make_damage_error(
            block, f"it holds {len(body)} bytes, its counts take {_COUNTS.size}"
        )
    elements, rest = divmod(block.nbytes, block.itemsize)
    changed, wide_gaps, wide_values = _COUNTS.unpack_from(body)
    sizes = (changed, changed * code.short.itemsize, 4 * wide_gaps, block.itemsize * wide_values)
    if _COUNTS.size + sum(sizes) + rest != len(body):
        raise _make_damage_error(
            block, f"its counts do not add up to the {len(body)} bytes it holds"
        )
    ends = list(itertools.accumulate(sizes, initial=_COUNTS.size))
    _, gaps8, short8, gaps32, values, tail = np.split(np.frombuffer(body, np.uint8), ends)
    where = _decode_indices(block, gaps8, gaps32.view("<u4"))
    if where.size and where[-1] >= elements:
        raise _make_damage_error(block, f"it changes element {where[-1]} of {elements}")
    short = short8.view(code.short)
    if np.count_nonzero(short == code.escape) != wide_values:
        raise _make_damage_error(block, "its differences refer to another number of wide values")
    return _Patch(where, short, values.view(code.bits), tail)


def _decompress_body(block: Block, code: _ElementTypes) -> bytes:
    """Decompress the body, after checking the size that its frame states."""
    # At most every element has a wide value; a wide gap spans more than 255 elements.
    elements = block.nbytes // block.itemsize
    counted = elements * (1 + code.short.itemsize) + elements // (_WIDE_GAP + 1) * 4
    largest = _COUNTS.size + counted + block.nbytes
    try:
        size = zstandard.frame_content_size(block.payload)
        if not 0 <= size <= largest:
            raise _make_damage_error(
                block, f"its frame states {size} bytes, the limit is {largest}"
            )
        return zstandard.ZstdDecompressor().decompress(block.payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _make_damage_error(block, f"its payload is not a zstd frame ({error})") from None


def _decode_indices(
    block: Block, gaps8: npt.NDArray[np.uint8], gaps32: npt.NDArray[np.uint32]
) -> npt.NDArray[np.int64]:
    """Return the indices of changed elements from their gaps; ascending for any input."""
    steps = gaps8.astype(np.int64)
    wide = np.flatnonzero(gaps8 == _WIDE_GAP)
    if wide.size != gaps32.size:
        raise _make_damage_error(block, "its gaps refer to another number of wide gaps")
    steps[wide] = gaps32
    steps += 1
    steps[:1] -= 1  # the first gap counts from the block's first element
    return np.cumsum(steps, out=steps)


def _apply_patch(patch: _Patch, code: _ElementTypes, source: Bytes, target: Bytes) -> None:
    whole = source.nbytes - source.nbytes % code.bits.itemsize
    old = source[:whole].view(code.bits)[patch.where]
    values = old + patch.short.astype(code.signed).view(code.bits)  # modulo 2 ** bits
    values[patch.short == code.escape] = patch.wide
    np.copyto(target, source)
    target[:whole].view(code.bits)[patch.where] = values
    target[whole:] = patch.rest


def _check_place(block: Block, total_bytes: int) -> None:
    inside = block.offset >= 0 and 1 <= block.nbytes <= total_bytes - block.offset
    if not inside or block.nbytes > BLOCK_ELEMENTS * block.itemsize:
        raise _make_damage_error(block, f"it lies outside a version of {total_bytes} bytes")
    if block.offset % block.itemsize:
        raise _make_damage_error(
            block, f"it does not start at an element of {block.itemsize} bytes"
        )


def _get_element_types(itemsize: int) -> _ElementTypes:
    if itemsize not in _ELEMENT_TYPES:
        raise DeltaError(
            f"no delta for elements of {itemsize} bytes; supported: {sorted(_ELEMENT_TYPES)}"
        )
    return _ELEMENT_TYPES[itemsize]


def _make_damage_error(block: Block, reason: str) -> DeltaError:
    return DeltaError(f"delta block of {block.nbytes} bytes at {block.offset}: {reason}")
