"""How fast the simulator is: logged events per second of one core.

Usage: python tools/bench/sim.py [--seeds 20] [--large 0]
Prints one JSON line per figure.

sim_small_events_per_s        small runs without faults, invariants of the state as configured
sim_small_bare_events_per_s   the same without them
sim_small_faults_events_per_s the default swarm, with faults
sim_1024_events_per_s         1,024 replicas without faults, the first --large events (0: left out)

Processor time, because the machine may be busy. Every event is sent, carried, received, decided,
logged and acknowledged by the real code, and replayed up to three times at the end of its run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec

from laminar.sim.config import CheckConfig, SimConfig, load
from laminar.sim.faults import KINDS
from laminar.sim.liveness import CALM
from laminar.sim.run import run_seed
from laminar.sim.world import World

LARGE = Path(__file__).parents[2] / "configs" / "sim_1024.toml"
NEVER = 1 << 60


def speed(config: SimConfig, seeds: range) -> float:
    """Events per second of processor time over whole runs."""
    started, events = time.process_time(), 0
    for seed in seeds:
        events += run_seed(config, seed).events
    return events / (time.process_time() - started)


def speed_of_the_first(config: SimConfig, events: int) -> float:
    """Events per second of processor time over the beginning of one run."""
    world = World(config, 1)
    started = time.process_time()
    world.begin()
    while world.checks.events < events and not world.finished and world.scheduler.step():
        pass
    return world.checks.events / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="runs per figure")
    parser.add_argument("--large", type=int, default=0, help="events of the large run")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    swarm = SimConfig()
    calm = msgspec.structs.replace(swarm, faults=CALM)
    bare = msgspec.structs.replace(calm, checks=CheckConfig(invariants_every=NEVER))
    figures = {
        "sim_small_events_per_s": speed(calm, seeds),
        "sim_small_bare_events_per_s": speed(bare, seeds),
        "sim_small_faults_events_per_s": speed(swarm, seeds),
    }
    if arguments.large:
        large = msgspec.structs.replace(load(LARGE, KINDS), faults=CALM)
        figures["sim_1024_events_per_s"] = speed_of_the_first(large, arguments.large)
    for name, value in figures.items():
        print(json.dumps({"name": name, "value": round(value), "unit": "1/s"}))


if __name__ == "__main__":
    main()
