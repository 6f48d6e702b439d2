"""Gain of repack: the core in virtual time against the paper's policy and weights in flight.

Usage: python -m tools.bench.repack [--quick | --grid] [-j 2] [--results FILE]
Prints one JSON line per run, with progress on standard error, and then the figures. Repeated runs
differ only in `cpu_s` and `duration`.

(none)        the paper's table: 16 replicas of 32B on four GPUs, 1,024 trajectories with each
              version, staleness 4, three seeds; and one seed with the engine of its Figure 4, with
              a longer tail of responses (p99 = 10 medians), and with 5,000 tokens/s of prefill
--quick       one seed and fewer steps
--grid        4, 8, 16 and 64 replicas x staleness 1, 2 and 4 x 20,000 tokens/s of prefill, then
              the same at 5,000; three paired seeds: off, gain and both in-flight modes; with 64
              replicas the paper's policies, too
--results     file with finished runs, which are not repeated; new runs are appended

Policies: `paper-off` and `paper-on` drain 1,024 trajectories and then pull, without and with the
packing of the paper's Algorithm 1 (destinations pinned); `off`, `best-fit` and `gain` are the
core's own; `keep` and `recompute` model replicas that load new weights during a trajectory and
continue with their cache or prefill it again (in_flight.py). All obey the staleness bound; each run
asserts that, and that tokens sampled = trained + live. Every call also runs eight replicas with
responses of one length and staleness 0, where all policies must agree; a difference of more than
1 % is an error.

Trained tokens are those of batches that the trainer completed, generated tokens those that engines
sampled, both between the ends of two steps. Staleness is in steps, at the batch that trains: of a
group by its oldest weights, of a token by its own. `at equal token staleness` compares an in-flight
mode with gain by linear interpolation between two bounds. The trainer takes 236 s for 8,192
trajectories on the GPUs of 16 replicas, less on more: 16.9 % of an iteration (Figure 1), which
takes 697 s in the paper's 32B run on 128 colocated GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tools.bench.repack.cells import EQUAL, IN_FLIGHT, Cell, equal, grid, measured, results, table

AGREE = 0.01  #: largest difference where all policies must agree
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  #: 95 % interval of a mean, by number of values
World = dict[str, dict[int, dict[str, Any]]]  #: runs by policy and seed


def compared(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield means by policy, and ratios of runs with the same seed with a confidence interval."""
    by_world: dict[tuple[Any, ...], World] = {}
    for line in lines:
        world = tuple(line[name] for name in ("replicas", "staleness", "prefill", "engine"))
        by_world.setdefault(world, {}).setdefault(line["policy"], {})[line["seed"]] = line
    for world, policies in by_world.items():
        where = "{} replicas, staleness {}, prefill {}, {}".format(*world)
        for policy, runs in policies.items():
            yield {"name": f"{policy}: {where}", "seeds": len(runs)} | _means([*runs.values()])
        for policy, base in PAIRS:
            if policy in policies and base in policies:
                ratio = _ratio(policies[policy], policies[base])
                yield {"name": f"{policy} / {base}: {where}", "predicted": True} | ratio
        if world[-1] == EQUAL:
            yield _agreement(policies)
        for policy in IN_FLIGHT:
            bounds = [w for n, w in by_world.items() if (n[0], *n[2:]) == (world[0], *world[2:])]
            ratio_there = _as_fresh(policy, policies, bounds)
            if ratio_there is not None:
                name = f"{policy} / gain at equal token staleness: {where}"
                yield {"name": name, "predicted": True, "trained_per_s": ratio_there}


def _agreement(policies: World) -> dict[str, Any]:
    speeds = [run["trained_per_s"] for runs in policies.values() for run in runs.values()]
    apart = max(speeds) / min(speeds) - 1
    if apart > AGREE:
        raise SystemExit(f"equal lengths, staleness 0: policies are {100 * apart:.1f} % apart")
    return {"name": "all policies where they must agree", "apart": f"{100 * apart:.2f} %"}


def _as_fresh(policy: str, there: World, worlds: list[World]) -> str | None:
    """Return an in-flight mode ÷ gain at gain's token staleness; None if no bounds enclose it."""
    if "gain" not in there:
        return None
    gain, curve = _means([*there["gain"].values()]), []
    for world in worlds:
        if policy in world:
            found = _means([*world[policy].values()])
            curve.append((found["staleness_token_mean"], found["trained_per_s"]))
    curve.sort()
    wanted = gain["staleness_token_mean"]
    for (age, speed), (older, faster) in pairwise(curve):
        if age <= wanted <= older:
            speed += (wanted - age) / (older - age) * (faster - speed)
            return f"{100 * (speed / gain['trained_per_s'] - 1):+.1f} %"
    return None


PAIRS = (
    ("paper-on", "paper-off"),
    ("gain", "paper-off"),
    ("gain", "paper-on"),
    ("gain", "off"),
    ("best-fit", "off"),
    ("keep", "gain"),
    ("recompute", "gain"),
)
SHOWN = {
    "trained_per_s": 0, "generated_per_s": 0, "cache_use": 3, "latency_mean_s": 0,
    "latency_max_s": 0, "released": 1, "moved": 0, "idle": 3, "trainer_idle": 3,
    "staleness_group_mean": 2, "staleness_group_max": 1, "staleness_token_mean": 2,
}  # fmt: skip


def _means(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(mean(run[name] for run in runs), places) for name, places in SHOWN.items()}


def _ratio(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("trained_per_s", "generated_per_s"):
        ratios = [runs[seed][name] / base[seed][name] for seed in runs if seed in base]
        found[name] = f"{100 * (mean(ratios) - 1):+.1f} %"
        if len(ratios) in STUDENT:
            half = STUDENT[len(ratios)] * stdev(ratios) / math.sqrt(len(ratios))
            found[name] += f" (+- {100 * half:.1f})"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true")
    size.add_argument("--grid", action="store_true")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    begun = time.monotonic()
    cells = equal() + table(range(1, 4))
    if arguments.grid:
        cells = equal() + grid()
    elif arguments.quick:
        cells = equal() + table([1], steps=4)
    lines = []
    for line in results(cells, measured, arguments.jobs, arguments.results):
        print(json.dumps(line), flush=True)
        lines.append(line)
    order = {cell: number for number, cell in enumerate(cells)}
    lines.sort(key=lambda line: order[Cell(*(line[name] for name in Cell._fields))])
    for line in compared(lines):
        print(json.dumps(line), flush=True)
    print(json.dumps({"name": "duration", "value": round(time.monotonic() - begun), "unit": "s"}))


if __name__ == "__main__":
    main()
