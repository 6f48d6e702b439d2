"""Speed of log replay: every decision recomputed and compared, every state hash, one core.

Usage: python -m tools.bench.core.replay [--events 1000000] [--replicas 16 128 1024]
           [--log DIRECTORY]
Prints one JSON line per figure; exits 1 if the replay differs from the log.

replay_events_per_s         by the CPU time of the whole replay; with --log, of that log
replay_seconds_per_million
replay_vs_read_ratio        CPU time of the replay / of reading the log: CRCs and typed decoding
replay_events_per_s_at_N    the same for a cluster of N replicas of 64 trajectories each

The first number of replicas gives the figures without "_at_N". Without --log,
tools/bench/core/traffic.py makes a log in shared memory with the real tick and log writer, which
takes a minute for a million events. The logs of the other clusters have a third of the events.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import DecisionRecord, EventRecord
from laminar.eventlog.replay import replay_records
from laminar.events.codec import decode_command, decode_event
from laminar.weights.arena.arena import SHARED_MEMORY
from tools.bench.core.traffic import Traffic

CAPACITY = 64


def cpu_seconds(operation: Callable[[], object]) -> float:
    start = time.process_time()
    operation()
    return time.process_time() - start


def read(disk: RealDisk) -> None:
    """Check and decode all records and discard them."""
    for _, record in read_log(disk):
        if isinstance(record, EventRecord):
            decode_event(record.event)
        elif isinstance(record, DecisionRecord):
            decode_command(record.command)


def measure(directory: Path) -> tuple[float, float, float]:
    """Replay a log; return events per second, seconds per million events, ratio to a plain read."""
    disk = RealDisk(directory)
    read_s = cpu_seconds(lambda: read(disk))
    start = time.process_time()
    found = replay_records(disk)
    replay_s = time.process_time() - start
    if found.difference is not None:
        sys.exit(f"the replay differs from the log: {found.difference}")
    return found.events / replay_s, 1e6 * replay_s / found.events, replay_s / read_s


def measure_cluster(replicas: int, events: int) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        traffic = Traffic(RealDisk(Path(directory)), replicas=replicas, capacity=CAPACITY)
        traffic.run(events)
        return measure(Path(directory))


def show(name: str, value: float, unit: str) -> None:
    print(json.dumps({"name": name, "value": round(value, 2), "unit": unit}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 128, 1_024])
    parser.add_argument("--log", type=Path, help="events directory of a run")
    args = parser.parse_args()
    first, *others = args.replicas
    figures = measure(args.log) if args.log else measure_cluster(first, args.events)
    show("replay_events_per_s", figures[0], "1/s")
    show("replay_seconds_per_million", figures[1], "s")
    show("replay_vs_read_ratio", figures[2], "ratio")
    for replicas in [] if args.log else others:
        rate, *_ = measure_cluster(replicas, args.events // 3)
        show(f"replay_events_per_s_at_{replicas}", rate, "1/s")


if __name__ == "__main__":
    main()
