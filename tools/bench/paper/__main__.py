"""Throughput table of the Laminar paper in virtual time, compared with this project's policies.

Usage: python -m tools.bench.paper [--quick | --cells CELL ...] [-j 2] [--results FILE]
Prints one JSON line per run, with progress on standard error; then for each cell (model, GPUs) and
system the prediction with its interval, next to the paper's value for the rows that were read
(32B), and the ratios of this project's policies to the paper's policy under the same staleness
bound, each with its better number of trajectories. Repeated runs differ only in `cpu_s` and
`duration`.

--quick    32B on 32 and 64 GPUs
--cells    only the cells of a model (72B) or one cell (72B:256)
--results  file with finished runs, which are not repeated; new runs are appended

synchronous  colocated (verl): all GPUs generate a batch, then all train it
one-step     a batch is generated while the one before it is trained
areal        weights in flight, cache recomputed, everything stops for an update; no bound
paper        256 or 1,024 trajectories are drained, then the replica pulls; Algorithm 1; no bound
bounded      the same within the staleness bound
gain, keep   this project's: drain + repack, and weights in flight with the cache kept; bounded,
             at most 256 or 1,024 trajectories at a time

Every run asserts that sampled tokens = trained + live tokens. Every constant is in constants.toml
with its source; a constant without a source is refused. An interval spans the choices that the
paper leaves open: 256 to 1,024 trajectories, and for models other than the fitted one two ways to
scale its engine; it is widened by the system's largest error on the 32B rows. The prediction is its
geometric middle.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.paper.systems import FITTED_MODEL, K, Run, measured, runs_of
from tools.bench.repack.cells import results

QUICK = (f"{FITTED_MODEL}:32", f"{FITTED_MODEL}:64")


def predicted(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each cell and system, then the comparisons of the cell."""
    cells: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        cell = cells.setdefault((line["model"], line["gpus"]), {})
        cell.setdefault(line["system"], []).append(line)
    for (model, gpus), systems in cells.items():
        for system, found in systems.items():
            yield _prediction(model, gpus, system, found)
        if model == FITTED_MODEL:
            verl = _middle(systems["synchronous"])
            low, high = (edge / verl for edge in _edges(systems["paper"]))
            table = [K["table"][system][str(gpus)] for system in ("paper", "synchronous")]
            name = f"paper / synchronous: {model}, {gpus} GPUs"
            yield {"name": name, "low": round(low, 2), "high": round(high, 2)} | {
                "paper": round(table[0] / table[1], 2)
            }
        best = {name: _edges(systems[name])[1] for name in ("bounded", "gain", "keep")}
        ratios = {name: round(best[name] / best["bounded"], 3) for name in ("gain", "keep")}
        yield {"name": f"ours / the paper's, bounded: {model}, {gpus} GPUs"} | ratios


def _edges(runs: list[dict[str, Any]]) -> tuple[float, float]:
    speeds = [run["trained_per_s"] for run in runs]
    return min(speeds), max(speeds)


def _middle(runs: list[dict[str, Any]]) -> float:
    return math.sqrt(math.prod(_edges(runs)))


def _prediction(model: str, gpus: int, system: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    low, high = _edges(runs)
    wider = K["error"].get(system, 1.0)
    line: dict[str, Any] = {
        "name": f"{system}: {model}, {gpus} GPUs",
        "tokens_per_s": round(_middle(runs)),
        "low": round(low / wider),
        "high": round(high * wider),
    }
    for name in ("staleness_group_mean", "staleness_group_max", "staleness_token_mean"):
        line[name] = round(max(run[name] for run in runs), 2)
    if model == FITTED_MODEL and system in K["table"]:
        paper = K["table"][system][str(gpus)]
        line |= {"paper": paper, "ratio": round(_middle(runs) / paper, 2)}
        line["inside"] = (
            line["low"] <= paper <= line["high"] <= 2 * line["low"]
        )  # a wider interval says nothing
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", dest="cells", action="store_const", const=QUICK, default=[])
    only.add_argument("--cells", nargs="+", metavar="CELL")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    begun = time.monotonic()
    cells = [(model, int(gpus)) for model, by_gpus in K["split"].items() for gpus in by_gpus]
    for word in arguments.cells:
        if not any(word in (model, f"{model}:{gpus}") for model, gpus in cells):
            known = " ".join(f"{model}:{gpus}" for model, gpus in cells)
            parser.error(f"--cells {word}: unknown cell; choose from {known}")
    if wanted := arguments.cells:
        cells = [cell for cell in cells if cell[0] in wanted or f"{cell[0]}:{cell[1]}" in wanted]
    runs = [run for cell in cells for run in runs_of(*cell)]
    lines = []
    for line in results(runs, measured, arguments.jobs, arguments.results):
        print(json.dumps(line), flush=True)
        lines.append(line)
    order = {run: number for number, run in enumerate(runs)}
    lines.sort(key=lambda line: order[Run(*(line[name] for name in Run._fields))])
    for line in predicted(lines):
        print(json.dumps(line), flush=True)
    print(json.dumps({"name": "duration", "value": round(time.monotonic() - begun), "unit": "s"}))


if __name__ == "__main__":
    main()
