"""Time and steps to a score: asynchronous against synchronous training, in virtual time.

Usage: python -m tools.bench.race [--seeds 5] [-j 1] [--results FILE]
Prints one JSON line per run, with progress on standard error; then the mean and the standard
deviation of each policy. Runs that are in FILE are not repeated; new ones are appended. Repeated
runs differ only in `cpu_s`.

The quickstart's model really learns (learning.py), by the core's decisions, while time is a model
(schedule.py), so no figure depends on the machine or its load. The unit is the median time of a
response. A response takes one of 64 slots for a lognormal time; a step takes 2 (0.9 to 1.1 times
that), the publication of its weights 0.1, a load 0.1. After each step all held-out prompts are
sampled greedily, in no time. Policies of one seed share prompts, order, durations and sample seeds.

colocated      synchronous: all machines generate (96 slots), then all train (a step takes 2/3)
disaggregated  synchronous: bound 0
drain          a replica of four loads when it is empty, with repack "gain"
in-flight      the replica loads at once; its responses continue with the new weights

time_S, steps_S   until the score is S; null: not within STEPS_MAX
trainer_idle      share of the time; like all following figures until the end of the run
slots_used        share of the time of the slots
staleness         mean in steps, of a response by its oldest weights; token_staleness: of a token
left_out          samples that the learner takes for those of other weights: false alarms here
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tools.bench.race.learning import SCORES, measure_cell
from tools.bench.race.schedule import COLOCATED, DISAGGREGATED, DRAIN, IN_FLIGHT, Cell
from tools.bench.repack.cells import results

VARIANTS: Sequence[tuple[Sequence[int], dict[str, Any]]] = (
    ((1, 2, 4, 8), {}), ((1, 2, 4, 8), {"rate": 1e-4}), ((4, 8), {"p99": 5.0}),
    ((4, 8), {"p99": 2.0}), ((4, 8, 16), {"slots": 256}), ((4, 8), {"corrected": False}),
    ((8, 16), {"corrected": False, "slots": 256}),
)  # fmt: skip
"""Bounds of in-flight, and changes to the base case; 256 slots make the trainer the bottleneck."""
Policies = dict[Cell, dict[int, dict[str, Any]]]  #: runs by cell, with seed 0, and by seed


def list_cells(seeds: Iterable[int]) -> Iterator[Cell]:
    for seed in seeds:
        for bounds, changes in VARIANTS:
            for form in (COLOCATED, DISAGGREGATED) if "corrected" not in changes else ():
                yield Cell(form, 0, seed, **changes)
            for form in (IN_FLIGHT,) if changes else (IN_FLIGHT, DRAIN):
                yield from (Cell(form, bound, seed, **changes) for bound in bounds)


def summarize_policies(policies: Policies) -> Iterator[dict[str, Any]]:
    """Yield a line per policy: [mean, standard deviation] over its seeds."""
    shown = [f"{what}_{score}" for score in SCORES for what in ("time", "steps")]
    for cell, runs in policies.items():
        line: dict[str, Any] = cell._asdict() | {"seed": sorted(runs)}
        for name in (*shown, "trainer_idle", "slots_used", "staleness", "token_staleness"):
            line[name] = compute_spread([run[name] for run in runs.values()])
        base = policies.get(cell._replace(form=COLOCATED, bound=0, corrected=True), {})
        for name in shown if base.keys() >= runs.keys() else ():
            pairs = [(base[seed][name], run[name]) for seed, run in runs.items()]
            ratios = [slow and fast and slow / fast for slow, fast in pairs]
            line[f"{name}: colocated / this"] = compute_spread(ratios)
        yield line


def compute_spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return mean and standard deviation; None if a value is missing."""
    if None in values:
        return None
    return round(mean(values), 3), round(stdev(values), 3) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    policies: Policies = {}
    cells = list(list_cells(range(1, arguments.seeds + 1)))
    for line in results(cells, measure_cell, arguments.jobs, arguments.results):
        print(json.dumps(line), flush=True)
        cell = Cell(*(line[name] for name in Cell._fields))
        policies.setdefault(cell._replace(seed=0), {})[cell.seed] = line
    for line in summarize_policies(policies):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
