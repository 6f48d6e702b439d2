"""Runs of the repack benchmark: their parameters and how to measure them.

Gives   Cell; table, equal and grid, lists of cells; measured, the line of a cell; results, of many
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from tools.bench.repack.drains import drains
from tools.bench.repack.in_flight import InFlight
from tools.bench.repack.measures import Seen, Setup
from tools.bench.repack.world import RepackWorld

CACHE_TOKENS = 800_000  #: cache of four GPUs of 80 GB next to the weights, at 256 KiB per token
LIMIT = 16_000  #: maximum tokens of a response


class Parameters(NamedTuple):
    """Parameters of an engine and of response lengths."""

    step_us: float
    sequence_us: float
    token_us: float
    median_tokens: float
    p99_to_median: float

    def timing(self, prefill_tokens_per_s: float) -> EngineTiming:
        return EngineTiming(
            self.step_us, self.sequence_us, prefill_tokens_per_s, self.token_us, CACHE_TOKENS
        )

    def lengths(self) -> ResponseLengths:
        return ResponseLengths(round(self.median_tokens), LIMIT, self.p99_to_median)


FITTED = Parameters(32_000, 43.5, 0.0175, 3_124, 3.39)
"""Fit to the paper's measurements without repack: docs/policies.md, "Fitted"."""
FIGURE_4 = FITTED._replace(step_us=11_000, sequence_us=0, token_us=0.025)
"""Engine of the paper's Figure 4; with few sequences 2.5 times as fast as that of Figure 9."""
PAPERS = {"paper-off": "", "paper-on": "best-fit"}
OWN = {"off": "", "best-fit": "best-fit", "gain": "gain"}
IN_FLIGHT = {"keep": False, "recompute": True}
MAX_BATCH = 192
EQUAL, LONG_TAIL = "equal-lengths", "long-tail"
ENGINES = {
    "figure-9": FITTED,
    "figure-4": FIGURE_4,
    LONG_TAIL: FITTED._replace(p99_to_median=10.0, median_tokens=2_200),  #: same mean
    EQUAL: FITTED._replace(p99_to_median=1.0, median_tokens=750),  #: fits the cache
}
TRAIN_S, TRAINER_OF = 236.0, 16  #: seconds of a 32B step on the GPUs of 16 replicas


class Cell(NamedTuple):
    """Parameters of one run."""

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
    """Make the run of a cell and return its line."""
    begun = time.process_time()
    seen = cell.run()
    line = cell._asdict() | {
        "trained_per_s": round(seen.trained_per_s, 1),
        "generated_per_s": round(seen.generated_per_s, 1),
    }
    rounded = {n: round(v, 4) for n, v in seen._asdict().items()}
    return line | rounded | {"cpu_s": round(time.process_time() - begun, 1)}


def table(seeds: Iterable[int], **changes: int) -> list[Cell]:
    """Return the paper's cells, and some with Figure 4's engine, a long tail, slow prefill."""
    policies = [*PAPERS, *OWN, *IN_FLIGHT]
    cells = [Cell(policy, seed, **changes) for seed in seeds for policy in policies]
    cells += [Cell(policy, 1, engine="figure-4", **changes) for policy in PAPERS]
    compared = ("off", "gain", *IN_FLIGHT)
    cells += [Cell(policy, 1, engine=LONG_TAIL, **changes) for policy in compared]
    return cells + [Cell(policy, 1, prefill=5_000, **changes) for policy in compared]


def equal() -> list[Cell]:
    """Return cells in which each step takes all trajectories, so that policies must agree."""
    return [
        Cell(policy, 1, 8, 0, engine=EQUAL, warm_steps=1, steps=2)
        for policy in (*PAPERS, *OWN, *IN_FLIGHT)
    ]


def grid() -> list[Cell]:
    """Return the grid of cells; a step has 8,192 trajectories for any number of replicas."""
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
    """Yield a line for each cell: first those in the file, then the others, in a fixed order."""
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
