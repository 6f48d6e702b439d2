"""What a simulated run costs: CPU-seconds per 1,000 trajectories.

Usage: python tools/bench/sim.py [--seeds 20] [--large 0] [--turns 0]
Prints one JSON line per figure.

sim_small_cpu_s_per_1000        small runs without faults, invariants of the state as configured
sim_small_bare_cpu_s_per_1000   the same without them
sim_small_faults_cpu_s_per_1000 the default swarm, with faults
sim_1024_cpu_s_per_1000         1,024 replicas without faults, the first --large events (0: none)
sim_1024_log_bytes_per_turn     with an environment: bytes of the coordinator's log, before it is
                                compressed, for each answered turn of the second half of --turns
                                (0: none); `without_gauges`, which come with time, not with turns
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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar.core.state.state import State
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord, Position, Record
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.codec import decode_event
from tools.simulator.config import CheckConfig, EnvironmentConfig, LogConfig, SimConfig, load
from tools.simulator.faults.faults import KINDS
from tools.simulator.run import CALM, run_seeds
from tools.simulator.world import World

LARGE = Path(__file__).parents[2] / "configs" / "sim_1024.toml"
NEVER = 1 << 60
ANSWERED = (ev.TrajectoryContinues, ev.TrajectoryRewarded)  #: by the environment


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


def log_of_turns(config: SimConfig, turns: int) -> dict[str, tuple[float, str]]:
    """The log of a run with an environment, whose calls are not to be made twice."""
    config = msgspec.structs.replace(
        config,
        environment=EnvironmentConfig(environment_share=1.0, effects="once", answer_s=0.5),
        log=LogConfig(segment_bytes=1 << 30, snapshot_every=NEVER),
        checks=CheckConfig(invariants_every=NEVER, events_max=NEVER),
    )
    answered = 0

    def count(stamped: Stamped, commands: list[Command], state: State) -> None:
        nonlocal answered
        answered += isinstance(stamped.event, ANSWERED)

    with World(config, 1, count) as world:
        world.begin()
        while answered < turns and not world.finished and world.scheduler.step():
            pass
        return _bytes_per_turn(list(read_log(world.coordinator.disk)), turns // 2)


def _bytes_per_turn(
    history: list[tuple[Position, Record]], without: int
) -> dict[str, tuple[float, str]]:
    """Of the turns after the first ones, in which all begin at once."""
    answered, gauges, others = 0, 0, 0
    for (at, record), (following, _) in pairwise(history):
        event = decode_event(record.event) if isinstance(record, EventRecord) else None
        answered += isinstance(event, ANSWERED)
        if answered < without:
            continue
        if isinstance(event, ev.TokenProgress):
            gauges += following.offset - at.offset
        else:
            others += following.offset - at.offset
    turns = answered - without
    return {
        "log_bytes_per_turn": (round((gauges + others) / turns), "B"),
        "log_bytes_per_turn_without_gauges": (round(others / turns), "B"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="runs per figure; 0: none")
    parser.add_argument("--large", type=int, default=0, help="events of the large run")
    parser.add_argument("--turns", type=int, default=0, help="of the large run with an environment")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    swarm = SimConfig()
    calm = msgspec.structs.replace(swarm, faults=CALM)
    bare = msgspec.structs.replace(calm, checks=CheckConfig(invariants_every=NEVER))
    costs = {}
    if seeds:
        costs["sim_small"] = of_runs(calm, seeds)
        costs["sim_small_bare"] = of_runs(bare, seeds)
        costs["sim_small_faults"] = of_runs(swarm, seeds)
    large = msgspec.structs.replace(load(LARGE, KINDS), faults=CALM)
    if arguments.large:
        costs["sim_1024"] = of_the_first(large, arguments.large)
    figures = [(name, cost.figures()) for name, cost in costs.items()]
    if arguments.turns:
        figures.append(("sim_1024", log_of_turns(large, arguments.turns)))
    for name, found in figures:
        for what, (value, unit) in found.items():
            print(json.dumps({"name": f"{name}_{what}", "value": value, "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
