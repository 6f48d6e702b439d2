"""Effective training time ratio (ETTR) of a run whose steps are hit by faults.

Usage: python -m tools.bench.ettr [-c CONFIG] [--hits 20] [--rate 0.1] [--kinds kill] [--seed 0]
           [--keep DIR] [key=value ...]
Prints one JSON line per fault, one per role and one with the ratio; exits 1 if a run fails, its
books do not agree, its log does not replay or something is left of it.

Two equal runs train side by side until the last hit. One is fault-free. In the other, --rate of
the steps are hit by a fault of a process of a random role (tools/bench/kills), each role equally
often. As in RobustRL (arXiv 2512.22492), ETTR = completed steps x step time of the fault-free run /
wall time, from the first step on. Without -c: 64 emulated replicas on four emulated machines.
`recovery.max_restarts` and `recovery.restart_window_s` are scaled to steps of seconds.

noticed_s, joined_s, ready_s, redone_s, next_step_s   as in tools/bench/kills
cost_s    mean of next_step_s less the time of a fault-free step, by role
load      mean of the one-minute load average while both ran
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from laminar.events import events as ev
from tools.bench.kills import killed_run as kills
from tools.bench.kills.lost_answers import Log, read_log
from tools.kit.real_run import Run, check, print_lines

EMULATED = "configs/emulated_256.toml"
SMALL = (
    "run.nodes=4", "rollout.replicas=16", "emulation.replicas_per_process=16", "data.val_size=0",
    "data.train_batch_size=16", "data.max_response_length=256", "emulation.median_response=25",
    "emulation.step_us=120000", "emulation.train_s=3", "emulation.weights_mb=1",
)  # fmt: skip
"""64 replicas with steps of seconds."""
SCALED = (
    "recovery.max_restarts=99", "recovery.restart_window_s=60", "trainer.test_freq=0",
    "trainer.val_before_train=false", "trainer.total_training_steps=100000",  # drained before
)  # fmt: skip


def parse_arguments(document: str, **numbers: float) -> argparse.Namespace:
    """Parse the options of a bench; `config` and `settings` include the defaults above."""
    parser = argparse.ArgumentParser(description=document.split("\n")[0])
    parser.add_argument("-c", "--config")
    for name, number in {"rate": 0.1, "seed": 0, **numbers}.items():
        parser.add_argument(f"--{name}", type=type(number), default=number)
    parser.add_argument("--kinds", default="kill", help="of kill, stop and slow")
    parser.add_argument("--keep", type=Path, help="run directory to keep")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    args.settings = [*(() if args.config else SMALL), *SCALED, *args.settings]
    args.config = args.config or EMULATED
    return args


def find_step_ends(log: Log) -> list[float]:
    """Return the unix time in s at which each step was first completed."""
    return [told.at_ns / 1e9 for told in log.events if isinstance(told.event, ev.StepCompleted)]


def compute_ratio(twin_s: Sequence[float], hit_s: Sequence[float]) -> tuple[float, float]:
    """Return the ETTR and the fault-free step time, from the ends of the steps of both runs."""
    step_s = (twin_s[-1] - twin_s[0]) / (len(twin_s) - 1)
    return (len(hit_s) - 1) * step_s / (hit_s[-1] - hit_s[0]), step_s


def run_pair(run_dir: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Make both runs, run_dir and its twin; yield the figures."""
    chance, faults, load = random.Random(args.seed), list[kills.Fault](), list[float]()
    twin, training = (
        Run(each, args.config, args.settings) for each in (find_twin(run_dir), run_dir)
    )
    with twin, training:
        training.until_step(1)
        every = [
            (kind, role) for kind in args.kinds.split(",") for role in kills.find_roles(training)
        ]
        drawn = [fault for _ in range(args.hits) for fault in chance.sample(every, len(every))]
        injector = kills.Injector(training, chance)
        for step, kind, role in kills.draw_plan(drawn[: args.hits], args.rate, chance):
            while (now := training.step()) < step:
                training.until_step(now + 1)
                load.append(os.getloadavg()[0])
            faults.append(injector.strike(kind, role))
        training.drain()
        twin.drain()
    for one in (twin, training):
        check(one.run_dir)
        kills.check_leftovers(one.run_dir)
    yield from compare_pair(run_dir, faults, sum(load) / len(load))


def find_twin(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}-twin")


def compare_pair(
    run_dir: Path, faults: Sequence[kills.Fault], load: float
) -> Iterator[dict[str, Any]]:
    log = read_log(run_dir)
    ends_s = find_step_ends(log)
    ratio, step_s = compute_ratio(find_step_ends(read_log(find_twin(run_dir))), ends_s)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for fault in faults:
        stages = kills.times(fault, log.events)
        found[fault.role].append(stages)
        yield {"hit": fault.name, "role": fault.role, "kind": fault.kind, **stages}
    for role, hits in found.items():
        keys = dict.fromkeys(key for stages in hits for key in stages)
        means = {k: round(float(np.mean([s[k] for s in hits if k in s])), 2) for k in keys}
        cost_s = round(means.get("next_step_s", step_s) - step_s, 2)
        yield {"role": role, "hits": len(hits), **means, "cost_s": cost_s}
    repeated = sum(isinstance(told.event, ev.StepRepeated) for told in log.events)
    yield {
        "name": "ETTR", "value": round(ratio, 3), "hits": len(faults), "steps": len(ends_s),
        "repeated_steps": repeated, "step_s": round(step_s, 2),
        "wall_s": round(ends_s[-1] - ends_s[0], 1), "load": round(load, 1), "cores": os.cpu_count(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(print_lines(run_pair, parse_arguments(__doc__ or "", hits=20)))
