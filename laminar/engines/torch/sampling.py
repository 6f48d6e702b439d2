"""Counter-based random numbers for sampling: one uniform number per (trajectory, position).

Reads   a trajectory's seed (uint64) and an absolute position
Gives   u in [0, 1) with 53 bits

A generator with hidden state would have to migrate with its trajectory to another replica. A pure
function of (seed, position) needs nothing but the tokens: a replica that continues the sequence
draws the numbers that the first engine would have drawn, in any batch and any order. The function
is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014),
whose k-th output depends only on seed + k * gamma.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def draw_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return u in [0, 1) for each pair, [n]; a position counts the tokens before, with prompt."""
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    z = z ^ (z >> np.uint64(31))
    bits: NDArray[np.uint64] = z >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
