"""An engine and response lengths fitted to what the Laminar paper measured without repack.

Usage: python tools/bench/repack_fit.py [--evaluations 1500]
Prints one JSON line per figure: the paper's, the fit's, its weight; then the parameters found.

Reads   nothing
Gives   FITTED, the parameters that tools/bench/repack.py uses; drain, one replica by itself

Only measurements with repack off are fitted, so that what repack gains is predicted:

paper's Figure 9    one replica (32B, TP4) that drains 512 trajectories: when its cache is full and
                    until when, how many run then and later, when the last one ends
paper's Table 1,    16 replicas that drain 1,024 each: tokens per second, use of the cache, mean and
Figure 16           maximum latency of a trajectory
lengths             3,100 tokens on average (the paper's throughput and iteration make 3,600 with
                    the prompt) and p99 = 10 x median, as it says of its tasks

Fixed: 800,000 tokens of cache (four GPUs of 80 GB without the weights, 256 KiB a token), 20,000
tokens a second of prefill, answers of at most 16,000 tokens, no prompts. Figure 9 begins 30 s after
its zero. No lognormal fits everything: Figure 9 has fewer very short and very long answers than
p99 = 10 x median says.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from anywhere

from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths

CACHE_TOKENS = 800_000
LIMIT = 16_000
REPLICAS, PER_PULL, FIGURE_9 = 16, 1_024, 512
SEEDS = (1, 2, 3)
SECOND = 1e9


class Parameters(NamedTuple):
    """What is searched for."""

    step_us: float
    sequence_us: float
    token_us: float
    median_tokens: float
    p99_to_median: float

    def timing(self, prefill_tokens_per_s: float = 20_000.0) -> EngineTiming:
        return EngineTiming(
            self.step_us, self.sequence_us, prefill_tokens_per_s, self.token_us, CACHE_TOKENS
        )

    def lengths(self) -> ResponseLengths:
        return ResponseLengths(round(self.median_tokens), LIMIT, self.p99_to_median)


FITTED = Parameters(32_000, 43.5, 0.0175, 3_124, 3.39)
"""What `search` finds, rounded."""
FIGURE_4 = FITTED._replace(step_us=11_000, sequence_us=0, token_us=0.025)
"""The engine of the paper's Figure 4, 2.5 times as fast as that of Figure 9 with few sequences."""
LOWEST = Parameters(8_000, 0, 0.0, 1_200, 3)
HIGHEST = Parameters(40_000, 120, 0.05, 4_000, 11)


class Measured(NamedTuple):
    """A figure without repack, and how much it counts in the fit."""

    value: float
    weight: float


PAPER = {
    "tokens_per_s": Measured(54_000, 4.0),
    "cache_use": Measured(0.716, 4.0),
    "latency_mean_s": Measured(296, 1.5),
    "latency_max_s": Measured(826, 1.5),
    "mean_tokens": Measured(3_100, 1.0),
    "p99_to_median": Measured(10, 0.15),
    "figure_9_full_s": Measured(115, 0.7),
    "figure_9_ramp_down_s": Measured(298, 0.7),
    "figure_9_running_then": Measured(235, 0.5),
    "figure_9_end_s": Measured(642, 1.5),
    "figure_9_running_at_350_s": Measured(50, 0.1),
    "figure_9_running_at_420_s": Measured(15, 0.1),
    "figure_9_most_waiting": Measured(110, 0.02),
}


class Moment(NamedTuple):
    """Of one replica."""

    time_s: float
    running: int
    waiting: int
    cache_use: float


class Drained(NamedTuple):
    """What became of a batch that one replica drained."""

    tokens: int
    seconds: float
    cache_use: float  #: mean over the time
    latency_s: float  #: mean over the trajectories
    moments: list[Moment]


def drain(parameters: Parameters, trajectories: int, seed: int) -> Drained:
    """A replica gets so many trajectories at once and nothing after them."""
    batch, lengths = TimedBatch(parameters.timing(), PER_PULL), parameters.lengths()
    totals = [lengths.of(seed * 1_000_000 + number) for number in range(trajectories)]
    for number, total in enumerate(totals):
        batch.add(str(number), 0, 0, total, 0.0)
    batch.advance(0.0)
    moments, used, latency, before = [Moment(0.0, batch.running, 0, 0.0)], 0.0, 0.0, 0.0
    while (now := batch.next_ns) < math.inf:
        batch.advance(math.nextafter(now, 0.0))  # the cache grows evenly until then
        reached = batch.cached / CACHE_TOKENS
        used += (moments[-1].cache_use + reached) / 2 * (now - before)
        batch.advance(now)
        latency += len(batch.finished) * now / SECOND
        batch.finished.clear()
        use = batch.cached / CACHE_TOKENS
        moments.append(Moment(now / SECOND, batch.running, batch.waiting, use))
        before = now
    end_s = before / SECOND
    return Drained(sum(totals), end_s, used / before, latency / trajectories, moments)


def figures(parameters: Parameters) -> dict[str, float]:
    """The same that PAPER has, of these parameters."""
    drained = [drain(parameters, PER_PULL, seed) for seed in SEEDS]
    total_s = sum(d.seconds for d in drained)
    tokens = sum(d.tokens for d in drained)
    found = {
        "tokens_per_s": REPLICAS * tokens / total_s,
        "cache_use": sum(d.cache_use * d.seconds for d in drained) / total_s,
        "latency_mean_s": sum(d.latency_s for d in drained) / len(SEEDS),
        "latency_max_s": total_s / len(SEEDS),
        "mean_tokens": tokens / len(SEEDS) / PER_PULL,
        "p99_to_median": parameters.p99_to_median,
    }
    shapes = [_figure_9(drain(parameters, FIGURE_9, seed).moments) for seed in SEEDS]
    return found | {name: sum(s[name] for s in shapes) / len(SEEDS) for name in shapes[0]}


def _figure_9(moments: list[Moment]) -> dict[str, float]:
    """When the cache is never full, its fullest moment stands for it."""
    fullest = max(moments, key=lambda m: m.cache_use)
    full = [m for m in moments if m.cache_use >= 0.97] or [fullest]

    def running_at(time_s: float) -> float:
        return next((float(m.running) for m in moments if m.time_s >= time_s), 0.0)

    return {
        "figure_9_full_s": full[0].time_s,
        "figure_9_ramp_down_s": full[-1].time_s,
        "figure_9_running_then": float(full[-1].running),
        "figure_9_end_s": moments[-1].time_s,
        "figure_9_running_at_350_s": running_at(350),
        "figure_9_running_at_420_s": running_at(420),
        "figure_9_most_waiting": float(max(m.waiting for m in moments)),
    }


def error(found: dict[str, float]) -> float:
    """Weighted squares of logarithms of ratios."""
    return sum(
        paper.weight * math.log(max(found[name], 0.1) / paper.value) ** 2
        for name, paper in PAPER.items()
    )


def search(evaluations: int) -> Parameters:
    """A random search around the best so far; the same for the same number of evaluations."""
    chance, best, least = random.Random(1), LOWEST, math.inf
    spans = [high - low for low, high in zip(LOWEST, HIGHEST, strict=True)]
    for number in range(evaluations):
        if number < evaluations // 8:
            drawn = [chance.uniform(*pair) for pair in zip(LOWEST, HIGHEST, strict=True)]
        else:
            width = chance.choice((0.06, 0.012))
            drawn = [
                min(max(value + chance.gauss(0, width * span), low), high)
                for value, span, low, high in zip(best, spans, LOWEST, HIGHEST, strict=True)
            ]
        tried = Parameters(*drawn)
        if (found := error(figures(tried))) < least:
            best, least = tried, found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=1_500)
    best = search(parser.parse_args().evaluations)
    found = figures(best)
    for name, paper in PAPER.items():
        line = {"name": name, "paper": paper.value, "fit": round(found[name], 3)}
        print(json.dumps(line | {"weight": paper.weight}))
    print(json.dumps({"error": round(error(found), 3)} | best._asdict()))


if __name__ == "__main__":
    main()
