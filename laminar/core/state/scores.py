"""Scores as the core and the log keep them: the bits of a float64 as an unsigned integer.

Reads   nothing
Gives   bits_of, float_of, and sums that come out the same on every machine and Python
"""

from __future__ import annotations

import struct
from collections.abc import Iterable


def bits_of(score: float) -> int:
    """Return the float64 of a score as an integer."""
    return int.from_bytes(struct.pack("<d", score), "little")


def float_of(bits: int) -> float:
    score: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return score


def add_to_bits(bits: int, value: float) -> int:
    """Return the bits of a sum with one more term."""
    return bits_of(float_of(bits) + value)


def sum_in_order(values: Iterable[float]) -> float:
    """Return the sum in the given order; built-in `sum` rounds otherwise since Python 3.12."""
    found = 0.0
    for value in values:
        found += value
    return found
