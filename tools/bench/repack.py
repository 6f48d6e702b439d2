"""What repack gains: the core in virtual time, beside the paper's policy and weights in flight.

Usage: python tools/bench/repack.py [--quick | --grid] [-j 2] [--results FILE]
Prints one JSON line per run, progress on standard error, and then the figures, with what was fitted
and what is predicted. From one run of it to another only `cpu_s` and `duration` differ.

(none)        the paper's table: 16 replicas of 32B on four GPUs, 1,024 trajectories with each
              version, staleness 4, three seeds; and one seed with the engine of its Figure 4, with
              a longer tail of answers (p99 = 10 medians), and with 5,000 tokens/s of prefill
--quick       one seed and fewer steps
--grid        4, 8, 16 and 64 replicas x staleness 1, 2 and 4 x 20,000 tokens/s of prefill, then
              the same at 5,000; three paired seeds: off, gain and both ways in flight; with 64
              replicas the paper's policies, too
--results     runs that this file has are not run again; new ones are added to it

Policies: `paper-off` and `paper-on` drain 1,024 trajectories and then pull, without and with the
packing of the paper's Algorithm 1 (destinations pinned); `off`, `best-fit` and `gain` are the
core's own; `keep` and `recompute` model replicas that take new weights in mid-trajectory and go on
with their cache or prefill it again (repack_in_flight.py). All keep the staleness bound, which is
asserted in each run, as is that tokens sampled = trained + live. Always with it: eight replicas,
answers of one length, staleness 0, where every policy must do the same; more than 1 % apart is an
error.

Trained tokens are those of batches that the trainer completed, generated ones those that engines
sampled, both between the end of one step and that of another. Staleness is in steps, at the batch
that trains: by group that of its oldest weights, by token that of the token's own. `at equal token
staleness` compares a way in flight with gain between two of its bounds, linearly. The trainer takes
236 s for 8,192 trajectories on the GPUs of 16 replicas, less on more: Figure 1 has 16.9 % of an
iteration for it, and the paper's 32B run on 128 colocated GPUs takes 697 s.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
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
IN_FLIGHT = {"keep": False, "recompute": True}
MAX_BATCH = 192
EQUAL, LONG_TAIL = "equal-lengths", "long-tail"
ENGINES = {
    "figure-9": FITTED,
    "figure-4": FIGURE_4,
    LONG_TAIL: FITTED._replace(p99_to_median=10.0, median_tokens=2_200),  #: as many tokens
    EQUAL: FITTED._replace(p99_to_median=1.0, median_tokens=750),  #: all fit in the cache
}
TRAIN_S, TRAINER_OF = 236.0, 16  #: a step of 32B on as many GPUs as so many replicas have
AGREE = 0.01  #: where all must agree
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
            start_s=0.0 if self.engine == EQUAL else 600.0,
            train_s=TRAIN_S * TRAINER_OF / self.replicas if self.engine != EQUAL else 60.0,
        )

    def run(self) -> Seen:
        setup = self.setup()
        if self.policy in IN_FLIGHT:
            return InFlight(setup, IN_FLIGHT[self.policy]).run()
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
    """The paper's; beside it Figure 4's engine, a longer tail, and slower prefill."""
    policies = [*PAPERS, *OWN, *IN_FLIGHT]
    cells = [Cell(policy, seed, **changes) for seed in seeds for policy in policies]
    cells += [Cell(policy, 1, engine="figure-4", **changes) for policy in PAPERS]
    compared = ("off", "gain", *IN_FLIGHT)
    cells += [Cell(policy, 1, engine=LONG_TAIL, **changes) for policy in compared]
    return cells + [Cell(policy, 1, prefill=5_000, **changes) for policy in compared]


def equal() -> list[Cell]:
    """Every step takes all that there is, so no policy has anything to decide."""
    return [
        Cell(policy, 1, 8, 0, engine=EQUAL, warm_steps=1, steps=2)
        for policy in (*PAPERS, *OWN, *IN_FLIGHT)
    ]


def grid() -> list[Cell]:
    """A step is of 8,192 trajectories, whatever the number of replicas."""
    return [
        Cell(policy, seed, replicas, staleness, prefill)
        for prefill in (20_000, 5_000)
        for seed in range(1, 4)
        for replicas in (4, 8, 16, 64)
        for staleness in (1, 2, 4)
        for policy in ("off", "gain", *IN_FLIGHT, *(PAPERS if replicas == 64 else ()))
    ]


def results(
    cells: list[Any], measured: Callable[[Any], dict[str, Any]], jobs: int, kept: Path | None
) -> Iterator[dict[str, Any]]:
    """A line for each cell, all of one kind: those that are in the file, then the others, each in
    the order of `cells`, so that a run prints the same as any other."""
    kind, known = type(cells[0]), {}
    if kept is not None and kept.exists():
        lines = map(json.loads, kept.read_text().splitlines())
        known = {kind(*(line[name] for name in kind._fields)): line for line in lines}
    yield from (known[cell] for cell in cells if cell in known)
    missing = [cell for cell in cells if cell not in known]
    if not missing:
        return
    with get_context("spawn").Pool(jobs) as pool:
        for number, line in enumerate(pool.imap(measured, missing), 1):
            print(f"{number} of {len(missing)} runs", file=sys.stderr, flush=True)
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


World = dict[str, dict[int, dict[str, Any]]]  #: runs by policy and seed


def compared(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means by policy, and ratios of the same seed's runs with the interval of their mean."""
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
    """A way in flight ÷ gain here, at gain's token staleness; None: no bounds on both sides."""
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
    for line in fitted():
        print(json.dumps(line), flush=True)
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
