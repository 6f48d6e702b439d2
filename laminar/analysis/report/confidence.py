"""Means of a few measurements, with confidence intervals.

Reads   measurements that are taken to be independent
Gives   Estimate: a mean with half the length of its 95 % interval; estimate_gain, of pairs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

#: 97.5th percentiles of Student's t, by degrees of freedom from 1
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_975 = 1.960  #: beyond the table


class Estimate(NamedTuple):
    """Mean; `half` is None for a single measurement, which says nothing about the variance."""

    mean: float
    half: float | None


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """Return the mean and half of its 95 % interval; None without measurements."""
    if not values:
        return None
    if len(values) == 1:
        return Estimate(float(values[0]), None)
    freedom = len(values) - 1
    t = T_975[freedom - 1] if freedom <= len(T_975) else NORMAL_975
    return Estimate(mean(values), t * stdev(values) / math.sqrt(len(values)))


def estimate_gain(without: Sequence[float], with_it: Sequence[float]) -> Estimate | None:
    """Return the mean relative gain over pairs of comparable measurements; None without pairs."""
    return estimate_mean([b / a - 1 for a, b in zip(without, with_it, strict=True) if a])
