"""The cost of a chain against its closed form, and the choice of the next version."""

import pytest

from laminar.weights.chain.sender import next_version
from laminar.weights.version import chunking

GB = 10**9


@pytest.mark.parametrize("size", [1 << 30, 2 * GB, 4 * GB])
def test_the_chunk_is_the_best_one_within_its_limits(size: int) -> None:
    """A chain of p machines with k chunks takes (p + k - 2) times what a chunk takes."""
    found = chunking.usual_chunk_bytes(size)
    assert found % (64 << 10) == 0

    def cost(chunk: float) -> float:
        seconds = chunk * chunking.SECONDS_PER_BYTE + chunking.START_SECONDS
        return (chunking.MACHINES + size / chunk - 2) * seconds

    for other in (chunking.CHUNK_BYTES_MIN, chunking.CHUNK_BYTES_MAX):
        assert cost(found) <= cost(other) * 1.01


def test_chunks_are_neither_tiny_nor_huge() -> None:
    assert chunking.usual_chunk_bytes(1 << 20) == chunking.CHUNK_BYTES_MIN
    assert chunking.usual_chunk_bytes(140 * GB) == chunking.CHUNK_BYTES_MAX


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
