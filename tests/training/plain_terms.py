"""Terms of the losses one token at a time, by cases and without tensors.

They share nothing with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

LEVELS: dict[str, Callable[[Sequence[float]], float]] = {
    "seq_sum": sum, "seq_mean": fmean, "seq_max": max
}  # fmt: skip


def plain_value_loss(
    value: float, before: float, wanted: float, limit: float
) -> tuple[float, float, bool]:
    """Return a critic's loss of one token, its derivative, and whether the value was clipped."""
    error = abs(value - wanted)
    for bound, beyond in ((before + limit, value - before), (before - limit, before - value)):
        if beyond > limit and abs(bound - wanted) > error:
            return (bound - wanted) ** 2 / 2, 0.0, True
    return error**2 / 2, value - wanted, False


def plain_vanilla_loss(
    ratio: float, advantage: float, low: float, high: float, ceiling: float
) -> tuple[float, float, str]:
    """Return PPO's loss of one token, its derivative by the log-prob, and the bound that decides.

    The bound: "clipped" of the ratio, "clipped_lower" of the loss, or "".
    """
    decides, most = "", ratio
    if advantage > 0 and ratio > 1 + high:
        decides, most = "clipped", 1 + high
    if advantage < 0 and ratio < 1 - low:
        decides, most = "clipped", 1 - low
    if advantage < 0 and ratio > ceiling:
        decides, most = "clipped_lower", ceiling
    return -advantage * most, 0.0 if decides else -advantage * ratio, decides


def plain_kept(rule: str, bound: str, log_ratios: Sequence[float]) -> list[bool]:
    """Return which tokens of one sequence a rule of rejection leaves; log_ratios: of rho."""
    low, high = map(float, bound.split("_")) if "_" in bound else (1 / float(bound), float(bound))
    level, _, estimate = rule.rpartition("_")
    values = [
        {"k1": 1 / math.exp(x), "k2": x * x / 2, "k3": math.expm1(x) - x}[estimate]
        for x in log_ratios
    ]
    if level != "token":
        of_all = [math.log(value) if estimate == "k1" else value for value in values]
        whole = LEVELS[level](of_all)
        values = [math.exp(whole) if estimate == "k1" else whole] * len(values)
    return [low <= value <= high if estimate == "k1" else value <= high for value in values]
