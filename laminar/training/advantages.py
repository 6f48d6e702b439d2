"""Group-relative advantages of outcome rewards: GRPO, Dr. GRPO and RLOO.

Reads   the rewards of the scored siblings of one group
Gives   one float64 advantage per sibling, for all tokens of its response

The baseline is the group itself, so a group that scored alike teaches nothing and must give
exactly zero. In float32 it does not: the mean of seven times 0.7 is not 0.7, and a tiny rest over
a tiny standard deviation is a real number of wrong sign as often as not. Hence float64, and a
spread below which a group counts as constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6  #: added to the standard deviation; verl's
CONSTANT_SPREAD = 1e-6  #: rewards that differ by no more than this are equal


def group_advantages(
    rewards: Sequence[float], *, estimator: str, norm_by_std: bool
) -> NDArray[np.float64]:
    """Advantages [n] of the n siblings of one group, in their order.

    grpo: (R - mean) / (std + 1e-6) with the sample standard deviation (n - 1), as in verl; R - mean
    when `norm_by_std` is off (Dr. GRPO, Liu et al. 2025). rloo: R minus the mean of the others
    (Ahmadian et al. 2024), never divided. A group of one has no baseline: its advantage is 0.

    Raises ValueError for a reward that is not finite or an unknown estimator.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {list(rewards)} are not all finite; the group cannot be scored")
    if estimator not in ("grpo", "rloo"):
        raise ValueError(f"advantage estimator {estimator!r} is not one of grpo, rloo")
    if np.ptp(values) <= CONSTANT_SPREAD:
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    if estimator == "rloo":
        centred *= len(values) / (len(values) - 1)
    elif norm_by_std:
        centred /= values.std(ddof=1) + STD_EPSILON
    return centred
