"""Runs with repack beside runs without it: what each policy reached, and by how much more.

Reads   summaries of runs
Gives   Policy, one for each that occurs among the runs; gains over the runs without repack

Of several runs with one policy the interval is of their mean, over the runs; of a single one it is
that of its own throughput. Gains are of pairs: two runs with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from laminar.analysis.confidence import Estimate, estimate, relative_gain

Summary = Mapping[str, Any]
OFF = "off"


class Policy(NamedTuple):
    """Means over the runs; None where none of them has the figure."""

    name: str
    runs: int
    tokens_per_s: Estimate | None
    latency_mean_s: float | None
    latency_max_s: float | None
    hand_over_s: float | None
    kv_use: float | None
    nearly_empty: float | None


def policy_of(summary: Summary) -> str:
    return str(summary["repack"]["policy"]) if summary["repack"] else OFF


def policies(summaries: Sequence[Summary]) -> list[Policy]:
    """Without repack first, then in the order in which they come."""
    names = dict.fromkeys(map(policy_of, summaries))
    order = sorted(names, key=lambda name: name != OFF)
    return [_policy(name, [s for s in summaries if policy_of(s) == name]) for name in order]


def _policy(name: str, runs: Sequence[Summary]) -> Policy:
    rates = estimate([s["tokens_per_s"] for s in runs if s["tokens_per_s"] is not None])
    if rates is not None and len(runs) == 1:
        rates = Estimate(rates.mean, runs[0]["tokens_per_s_ci95"])
    hand_overs = [s["repack"]["hand_over_s"] for s in runs if s["repack"]]
    return Policy(
        name,
        len(runs),
        rates,
        _mean([s["latency_s_mean"] for s in runs]),
        max((s["latency_s_max"] for s in runs if s["latency_s_max"] is not None), default=None),
        _mean([found["mean"] for found in hand_overs if found]),
        _mean([s["kv_use_mean"] for s in runs]),
        _mean([s["nearly_empty_steps"] for s in runs]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    found = estimate([value for value in values if value is not None])
    return found.mean if found else None


def gains(summaries: Sequence[Summary]) -> Iterator[tuple[str, int, Estimate]]:
    """(policy, pairs, share by which its throughput is higher), where there are pairs."""
    by_policy: dict[str, dict[int, float]] = {}
    for summary in summaries:
        if summary["tokens_per_s"] is not None:
            rates = by_policy.setdefault(policy_of(summary), {})
            rates[summary["seed"]] = summary["tokens_per_s"]
    without = by_policy.pop(OFF, {})
    for name, rates in by_policy.items():
        seeds = sorted(without.keys() & rates.keys())
        gain = relative_gain([without[s] for s in seeds], [rates[s] for s in seeds])
        if gain is not None:
            yield name, len(seeds), gain
