"""How large a chunk of a version is, from the time that a chain of relays takes for it.

Reads   sizes, speeds
Gives   broadcast_seconds, chunk_bytes, usual_chunk_bytes

A chain of p machines with M bytes in k chunks takes

    T(p, k) = (p + k - 2) (M / k * seconds_per_byte + start_seconds)

since the last chunk leaves after k - 1 others and passes p - 2 relays. Few chunks fill the pipe
slowly, many pay the start of each. The best k is sqrt((p - 2) M seconds_per_byte / start_seconds).
"""

from __future__ import annotations

import math

CHUNK_BYTES_MIN = 2 << 20
"""Below it the cost per chunk shows: 1 MiB takes a tenth more processor time per byte."""
CHUNK_BYTES_MAX = 4 << 20
"""Above it nothing is gained, and chunks leave the cache between the socket and the checksum."""
_CHUNK_UNIT = 64 << 10
MACHINES, SECONDS_PER_BYTE, START_SECONDS = 8, 0.8e-9, 50e-6
"""Network cards of 10 Gbit/s, where nothing better is known. The optimum is flat."""


def estimate_broadcast_s(
    machines: int,
    num_chunks: int,
    total_bytes: int,
    seconds_per_byte: float,
    start_seconds: float,
) -> float:
    """Time until the last of `machines` (the publisher's among them, at least two) has it all."""
    chunk_seconds = total_bytes / num_chunks * seconds_per_byte + start_seconds
    return (machines + num_chunks - 2) * chunk_seconds


def chunk_bytes(
    machines: int, total_bytes: int, seconds_per_byte: float, start_seconds: float
) -> int:
    """The size of a chunk for which `broadcast_seconds` is least, within what suits a machine.

    A multiple of 64 KiB between CHUNK_BYTES_MIN and CHUNK_BYTES_MAX. One hop gains nothing from
    small chunks.
    """
    best = math.sqrt(max(0, machines - 2) * total_bytes * seconds_per_byte / start_seconds)
    wanted = total_bytes / best if best else CHUNK_BYTES_MAX
    clamped = min(max(wanted, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
    return int(clamped) // _CHUNK_UNIT * _CHUNK_UNIT


def usual_chunk_bytes(total_bytes: int) -> int:
    """The size of a chunk when it is not known how many relays there will be."""
    return chunk_bytes(MACHINES, total_bytes, SECONDS_PER_BYTE, START_SECONDS)
