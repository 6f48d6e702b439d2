"""The choice of the version to send next."""

import pytest

from laminar.weights.chain.sender import next_version


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
