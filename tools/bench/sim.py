"""What a simulated run costs: CPU-seconds per 1,000 trajectories.

Usage: python tools/bench/sim.py [--seeds 20] [--large 0]
Prints one JSON line per figure.

sim_small_cpu_s_per_1000        small runs without faults, invariants of the state as configured
sim_small_bare_cpu_s_per_1000   the same without them
sim_small_faults_cpu_s_per_1000 the default swarm, with faults
sim_1024_cpu_s_per_1000         1,024 replicas without faults, the first --large events (0: none)
..._events_per_s                for information: entries of the coordinator's log per CPU-second
..._calls_per_s                 for information: calls of the scheduler per CPU-second

A logged event is sent, carried, received, decided, logged and acknowledged by the real code,
checked by the simulator's own books, and decided again in the replays: of the whole log and of what
follows the newest snapshot at the end of the run, and of what a coordinator finds when it comes
back. A call of the scheduler is a message that arrives, a timer that rings or work that is done:
calls per second may rise while the simulator does more for the same run, so they are no measure of
its cost. Processor time, because the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar.sim.checks.liveness import CALM
from laminar.sim.config import CheckConfig, SimConfig, load
from laminar.sim.faults.faults import KINDS
from laminar.sim.run import run_seeds
from laminar.sim.world import World

LARGE = Path(__file__).parents[2] / "configs" / "sim_1024.toml"
NEVER = 1 << 60


class Cost(NamedTuple):
    """Of some simulated runs."""

    cpu_s: float
    trajectories: int  #: issued
    events: int
    calls: int

    def figures(self) -> dict[str, tuple[float, str]]:
        """Value and unit by the end of the figure's name."""
        return {
            "cpu_s_per_1000": (round(self.cpu_s / max(self.trajectories, 1) * 1000, 3), "s"),
            "events_per_s": (round(self.events / self.cpu_s), "1/s"),
            "calls_per_s": (round(self.calls / self.cpu_s), "1/s"),
        }


def of_runs(config: SimConfig, seeds: range) -> Cost:
    """Whole runs."""
    started, trajectories, events, calls = time.process_time(), 0, 0, 0
    for outcome in run_seeds(config, seeds, 1):
        trajectories += outcome.trajectories
        events += outcome.events
        calls += outcome.happenings
    return Cost(time.process_time() - started, trajectories, events, calls)


def of_the_first(config: SimConfig, events: int) -> Cost:
    """The beginning of one run."""
    with World(config, 1) as world:
        started = time.process_time()
        world.begin()
        while world.checks.events < events and not world.finished and world.scheduler.step():
            pass
        cpu_s = time.process_time() - started
    state = world.coordinator.state
    issued = state.ledger.trajectories.issued if state is not None else 0
    return Cost(cpu_s, issued, world.checks.events, world.scheduler.made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="runs per figure")
    parser.add_argument("--large", type=int, default=0, help="events of the large run")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    swarm = SimConfig()
    calm = msgspec.structs.replace(swarm, faults=CALM)
    bare = msgspec.structs.replace(calm, checks=CheckConfig(invariants_every=NEVER))
    costs = {
        "sim_small": of_runs(calm, seeds),
        "sim_small_bare": of_runs(bare, seeds),
        "sim_small_faults": of_runs(swarm, seeds),
    }
    if arguments.large:
        large = msgspec.structs.replace(load(LARGE, KINDS), faults=CALM)
        costs["sim_1024"] = of_the_first(large, arguments.large)
    for name, cost in costs.items():
        for what, (value, unit) in cost.figures().items():
            print(json.dumps({"name": f"{name}_{what}", "value": value, "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
