"""Throughput of the coordinator without its sockets, in events per second.

Usage: python -m tools.bench.core.tick [--peers 2 64 1024] [--events 100000]
Prints one JSON line per figure.

tick_events_per_s_at_N    events in the log / CPU time inside Tick.run_turn, with N replicas

Includes incoming frames, sessions, decoding, decisions, log records with one write and one sync per
turn in shared memory, and outgoing frames, but not the actors' ends of the links. A turn handles
the frames of 2 ms of virtual time (traffic.py): with few replicas that is at most one event, so the
fixed cost of a turn dominates there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from laminar.coordinator.system import RealDisk
from laminar.weights.arena.arena import SHARED_MEMORY
from tools.bench.core.traffic import Traffic

CAPACITY = 64


def events_per_s(replicas: int, events: int) -> float:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        traffic = Traffic(RealDisk(Path(directory)), replicas=replicas, capacity=CAPACITY)
        traffic.run(events)
        return traffic.tick.machine.state.seq / traffic.turn_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 64, 1_024], help="replicas")
    parser.add_argument("--events", type=int, default=100_000)
    args = parser.parse_args()
    for replicas in args.peers:
        rate = events_per_s(replicas, args.events)
        name = f"tick_events_per_s_at_{replicas}"
        print(json.dumps({"name": name, "value": round(rate), "unit": "1/s"}), flush=True)


if __name__ == "__main__":
    main()
