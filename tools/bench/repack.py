"""What repack gains: the core in virtual time, beside the paper's policy and a ceiling.

Usage: python tools/bench/repack.py [--quick | --grid] [-j 2] [--results FILE]
Prints one JSON line per run and then the figures, with what was fitted and what is predicted.

(none)        the paper's table: 16 replicas of 32B on four GPUs, 1,024 trajectories with each
              version, staleness 4, three seeds; and once more with the engine of its Figure 4
--quick       one seed and fewer steps
--grid        4, 8, 16 and 64 replicas x staleness 1, 2 and 4 x 5,000 and 20,000 tokens/s of
              prefill, five paired seeds: off and gain, and the ceiling; with 64 replicas the
              paper's policies, too
--results     runs that this file has are not run again; new ones are added to it

Policies: `paper-off` and `paper-on` drain 1,024 trajectories and then pull, without and with the
packing of the paper's Algorithm 1 (destinations pinned); `off`, `best-fit` and `gain` are the
core's own; `in-flight` is a model of replicas that take new weights in mid-trajectory
(repack_in_flight.py).

Trained tokens are those of batches that the trainer completed, generated ones those that engines
sampled, both between the end of one step and that of another. The trainer takes 236 s for 8,192
trajectories on the GPUs of 16 replicas, less on more: Figure 1 has 16.9 % of an iteration for it,
and the paper's 32B run on 128 colocated GPUs takes 697 s.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from anywhere

from tools.bench.repack_fit import FIGURE_4, FITTED, PAPER, figures
from tools.bench.repack_in_flight import InFlight
from tools.bench.repack_measures import Seen, Setup
from tools.bench.repack_paper import drains
from tools.bench.repack_world import RepackWorld

PAPERS = {"paper-off": "", "paper-on": "best-fit"}
OWN = {"off": "", "best-fit": "best-fit", "gain": "gain"}
IN_FLIGHT = "in-flight"
MAX_BATCH = 192
ENGINES = {"figure-9": FITTED, "figure-4": FIGURE_4}
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  #: 95 % interval of a mean, by number of values


class Cell(NamedTuple):
    """One run."""

    policy: str
    seed: int = 1
    replicas: int = 16
    staleness: int = 4
    prefill: int = 20_000
    engine: str = "figure-9"
    warm_steps: int = 6
    steps: int = 8

    def setup(self) -> Setup:
        parameters = ENGINES[self.engine]
        return Setup(
            replicas=self.replicas,
            staleness=self.staleness,
            policy=PAPERS.get(self.policy, OWN.get(self.policy, "")),
            max_batch=MAX_BATCH,
            timing=parameters.timing(self.prefill),
            lengths=parameters.lengths(),
            seed=self.seed,
            warm_steps=self.warm_steps,
            steps=self.steps,
        )

    def run(self) -> Seen:
        setup = self.setup()
        if self.policy == IN_FLIGHT:
            return InFlight(setup).run()
        if self.policy in PAPERS:
            with drains():
                return RepackWorld(setup).run()
        return RepackWorld(setup).run()


def measured(cell: Cell) -> dict[str, Any]:
    """Its line."""
    begun = time.process_time()
    seen = cell.run()
    line = cell._asdict() | {
        "trained_per_s": round(seen.trained_per_s, 1),
        "generated_per_s": round(seen.generated_per_s, 1),
    }
    rounded = {n: round(v, 4) for n, v in seen._asdict().items()}
    return line | rounded | {"cpu_s": round(time.process_time() - begun, 1)}


def table(seeds: Iterable[int], **changes: int) -> list[Cell]:
    """The paper's, with Figure 4's engine beside it."""
    policies = [*PAPERS, *OWN, IN_FLIGHT]
    cells = [Cell(policy, seed, **changes) for seed in seeds for policy in policies]
    other = [Cell(policy, 1, engine="figure-4", **changes) for policy in PAPERS]
    return cells + other


def grid() -> list[Cell]:
    """Small ones first. A step is of 8,192 trajectories, whatever the number of replicas."""
    return [
        Cell(policy, seed, replicas, staleness, prefill)
        for replicas in (4, 8, 16, 64)
        for staleness in (1, 2, 4)
        for prefill in (5_000, 20_000)
        for seed in range(1, 6)
        for policy in ("off", "gain", IN_FLIGHT, *(PAPERS if replicas == 64 else ()))
    ]


def results(cells: list[Cell], jobs: int, kept: Path | None) -> Iterator[dict[str, Any]]:
    """A line for each cell, in no order; those that are in the file first."""
    known = {}
    if kept is not None and kept.exists():
        lines = map(json.loads, kept.read_text().splitlines())
        known = {Cell(*(line[name] for name in Cell._fields)): line for line in lines}
    yield from (known[cell] for cell in cells if cell in known)
    missing = [cell for cell in cells if cell not in known]
    if not missing:
        return
    with get_context("spawn").Pool(jobs) as pool:
        for line in pool.imap_unordered(measured, missing):
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            yield line


# --- figures --------------------------------------------------------------------------------------


def fitted() -> Iterator[dict[str, Any]]:
    """What the engine and the lengths were fitted to, all of it without repack."""
    yield {"name": "parameters", "fitted": FITTED._asdict(), "figure_4": FIGURE_4._asdict()}
    found = figures(FITTED)
    for name, paper in PAPER.items():
        yield {"name": name, "fitted_to": paper.value, "fit": round(found[name], 3)}


def compared(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means by policy, and ratios of the same seed's runs with the interval of their mean."""
    by_world: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
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


PAIRS = (
    ("paper-on", "paper-off"),
    ("gain", "paper-off"),
    ("gain", "paper-on"),
    ("gain", "off"),
    ("best-fit", "off"),
    (IN_FLIGHT, "gain"),
)
SHOWN = {
    "trained_per_s": 0, "generated_per_s": 0, "cache_use": 3, "latency_mean_s": 0,
    "latency_max_s": 0, "released": 1, "moved": 0, "idle": 3,
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
    cells = table(range(1, 4))
    if arguments.grid:
        cells = grid()
    elif arguments.quick:
        cells = table([1], warm_steps=3, steps=3)
    for line in fitted():
        print(json.dumps(line), flush=True)
    lines = []
    for line in results(cells, arguments.jobs, arguments.results):
        print(json.dumps(line), flush=True)
        lines.append(line)
    order = {cell: number for number, cell in enumerate(cells)}
    lines.sort(key=lambda line: order[Cell(*(line[name] for name in Cell._fields))])
    for line in compared(lines):
        print(json.dumps(line), flush=True)
    print(json.dumps({"name": "duration", "value": round(time.monotonic() - begun), "unit": "s"}))


if __name__ == "__main__":
    main()
