"""The cost of a chain against its closed form, and the choice of the next version."""

import math

import pytest

from laminar.weights.chain.sender import next_version
from laminar.weights.version import chunking
from laminar.weights.version.chunking import chunk_bytes, estimate_broadcast_s

GB = 10**9
PER_BYTE, START = 1 / 10e9, 50e-6


@pytest.mark.parametrize(("machines", "size"), [(5, 256 << 20), (9, 1 << 30), (65, 2 * GB)])
def test_the_chunk_is_the_best_one_within_its_limits(machines: int, size: int) -> None:
    best_k = math.sqrt((machines - 2) * size * PER_BYTE / START)
    at_best = estimate_broadcast_s(machines, round(best_k), size, PER_BYTE, START)
    closed = size * PER_BYTE + (machines - 2) * START
    closed += 2 * math.sqrt((machines - 2) * size * PER_BYTE * START)
    assert at_best == pytest.approx(closed, rel=1e-4)
    for k in (best_k / 2, best_k * 2):
        assert estimate_broadcast_s(machines, round(k), size, PER_BYTE, START) > at_best
    found = chunk_bytes(machines, size, PER_BYTE, START)
    assert found % (64 << 10) == 0
    clamped = min(max(size / best_k, chunking.CHUNK_BYTES_MIN), chunking.CHUNK_BYTES_MAX)
    assert clamped - (64 << 10) < found <= clamped


def test_chunks_are_neither_tiny_nor_huge() -> None:
    assert chunk_bytes(1000, 1 << 20, PER_BYTE, START) == chunking.CHUNK_BYTES_MIN
    assert chunk_bytes(3, 140 * GB, PER_BYTE, 1.0) == chunking.CHUNK_BYTES_MAX
    assert chunk_bytes(2, 1 << 30, PER_BYTE, START) == chunking.CHUNK_BYTES_MAX  # no chain, one hop
    assert chunking.CHUNK_BYTES_MIN < chunk_bytes(9, 1 << 30, PER_BYTE, START / 10) < 4 << 20


@pytest.mark.parametrize(
    ("mine", "held", "partial", "declined", "wanted"),
    [
        ([], [], [], [], None),
        ([3, 4, 5], [], [], [], 5),  # a new relay gets the newest, whatever lies between
        ([3, 4, 5], [4], [], [], 5),
        ([3, 4, 5], [5], [], [], None),
        ([3, 4], [5], [], [], None),  # never an older one
        ([4, 5, 6], [3], [5], [], 5),  # what it has begun is finished first
        ([4, 6], [3], [5], [], 6),  # unless nobody has it any more
        ([4, 5], [4], [], [5], None),
        ([4, 5], [3], [], [5], 4),
    ],
)
def test_next_version(
    mine: list[int], held: list[int], partial: list[int], declined: list[int], wanted: int | None
) -> None:
    assert next_version(mine, held, partial, declined) == wanted
