"""How fast the simulator is: logged events per second of one core.

Usage: python tools/bench/sim.py [--seeds 20] [--large 0]
Prints one JSON line per figure.

sim_small_events_per_s        small runs without faults, invariants of the state as configured
sim_small_bare_events_per_s   the same without them
sim_small_faults_events_per_s the default swarm, with faults
sim_1024_events_per_s         1,024 replicas without faults, the first --large events (0: left out)
..._happenings_per_s          the same runs, counted in calls of the scheduler

A logged event is one entry of the coordinator's log: it is sent, carried, received, decided, logged
and acknowledged by the real code, checked by the simulator's own books, and decided again in the
replays: of the whole log and of what follows the newest snapshot at the end of the run, and of what
a coordinator finds when it comes back. A happening is one call of the simulator's scheduler: a
message arrives, a timer rings, work is done; several of them lead to one logged event, and some,
such as heartbeats and acknowledgements, to none. Processor time, because the machine may be busy.
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
from laminar.sim.run import run_seeds
from laminar.sim.world import World

LARGE = Path(__file__).parents[2] / "configs" / "sim_1024.toml"
NEVER = 1 << 60


def speed(config: SimConfig, seeds: range) -> tuple[float, float]:
    """Events and happenings per second of processor time over whole runs."""
    started, events, happenings = time.process_time(), 0, 0
    for outcome in run_seeds(config, seeds, 1):
        events += outcome.events
        happenings += outcome.happenings
    elapsed = time.process_time() - started
    return events / elapsed, happenings / elapsed


def speed_of_the_first(config: SimConfig, events: int) -> tuple[float, float]:
    """Events and happenings per second of processor time over the beginning of one run."""
    world = World(config, 1)
    started = time.process_time()
    world.begin()
    while world.checks.events < events and not world.finished and world.scheduler.step():
        pass
    elapsed = time.process_time() - started
    return world.checks.events / elapsed, world.scheduler.made / elapsed


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
        "sim_small": speed(calm, seeds),
        "sim_small_bare": speed(bare, seeds),
        "sim_small_faults": speed(swarm, seeds),
    }
    if arguments.large:
        large = msgspec.structs.replace(load(LARGE, KINDS), faults=CALM)
        figures["sim_1024"] = speed_of_the_first(large, arguments.large)
    for name, (events, happenings) in figures.items():
        for what, value in (("events", events), ("happenings", happenings)):
            line = {"name": f"{name}_{what}_per_s", "value": round(value), "unit": "1/s"}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
