"""Chunk size of a version, chosen to minimize the time of a broadcast along a chain of relays.

Gives   usual_chunk_bytes

A chain of p machines with M bytes in k chunks takes

    T(p, k) = (p + k - 2) (M / k * seconds_per_byte + start_seconds)

since the last chunk leaves after k - 1 others and passes p - 2 relays. With few chunks the pipeline
fills slowly; with many, their start costs add up. The best k is
sqrt((p - 2) M seconds_per_byte / start_seconds).
"""

from __future__ import annotations

import math

CHUNK_BYTES_MIN = 2 << 20
"""Size below which the cost per chunk shows: 1 MiB takes a tenth more CPU time per byte."""
CHUNK_BYTES_MAX = 4 << 20
"""Size above which nothing is gained and chunks leave the cache between socket and checksum."""
_CHUNK_UNIT = 64 << 10
MACHINES, SECONDS_PER_BYTE, START_SECONDS = 8, 0.8e-9, 50e-6
"""Defaults for unknown hardware: network cards of 10 Gbit/s. The optimum is flat."""


def usual_chunk_bytes(total_bytes: int) -> int:
    """Return the chunk size to use while the number of relays is unknown.

    The size is a multiple of 64 KiB between CHUNK_BYTES_MIN and CHUNK_BYTES_MAX.
    """
    best = math.sqrt((MACHINES - 2) * total_bytes * SECONDS_PER_BYTE / START_SECONDS)
    clamped = min(max(total_bytes / best, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
    return int(clamped) // _CHUNK_UNIT * _CHUNK_UNIT
