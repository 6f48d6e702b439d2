"""Soak of a run under faults: memory, descriptors and threads of each process must not grow.

Usage: python -m tools.bench.soak [-c CONFIG] [--minutes 55] [--rate 0.1] [--kinds kill]
           [--seed 0] [--keep DIR] [key=value ...]
Prints one JSON line per process that lived long enough and one for the run; exits 1 if a resource
grows, the run fails, its books do not agree, its log does not replay or something is left of it.

--rate of the steps are hit by a fault of a process of a random role (tools/bench/kills). Every
SAMPLE_S seconds the rss (MiB), fds and threads of each process are recorded, and shm, the MiB of
the run in /dev/shm. The first WARM_S seconds of a process are left out. A resource grows if the
slope over the means of each minute is at least 1 % an hour and distinguishable from 0: t above
T_MAX, as a soak makes a hundred such tests. Each half must grow as much, which the halves of a
single step, as of a thread that starts late, do not. Asyncio tasks are not visible from outside.
Without -c: 64 emulated replicas on four emulated machines, as in tools/bench/ettr.py.

Two reserves fill slowly and are no growth. Of the store counts what exceeds its first rss by more
than PAGE_CACHE_MIB, the limit of its page cache. libzmq touches the queues of a connection by its
first 512 messages (55 kB in all), so heartbeats are frequent here.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from laminar.names.roles import Role
from laminar.storage.schema import PAGE_CACHE_KIB
from laminar.weights.arena.arena import SHARED_MEMORY
from tools.bench.ettr import parse_arguments
from tools.bench.kills import killed_run as kills
from tools.kit.real_run import Run, check, print_lines, read_json

SAMPLE_S, BLOCK_S, WARM_S = 5.0, 60.0, 1_200.0
BLOCKS_MIN = 6  #: minutes after the warm-up that a process must have lived
GROWTH_MAX = 0.01  #: share of the mean, an hour
T_MAX = 3.5
RESOURCES = ("rss", "fds", "threads")
PAGE_CACHE_MIB = PAGE_CACHE_KIB / 1024  #: of the store
Samples = defaultdict[tuple[str, int], list[tuple[float, ...]]]


class Slope(NamedTuple):
    """Growth of a resource."""

    mean: float
    share_per_hour: float  #: of the mean
    t: float  #: slope over its standard error
    least_per_hour: float  #: the same as share_per_hour, of the half in which it is smaller

    def is_growth(self) -> bool:
        return self.least_per_hour >= GROWTH_MAX and self.t > T_MAX


def fit_slope(times_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Return the slope over the means of blocks of time; None if there are too few.

    Means of a minute are nearly independent, unlike samples of a few seconds.
    """
    blocks = defaultdict(list)
    for at_s, value in zip(times_s, values, strict=True):
        if at_s - times_s[0] >= WARM_S:
            blocks[int((at_s - times_s[0]) // BLOCK_S)].append(value)
    if len(blocks) < BLOCKS_MIN:
        return None
    x, y = np.array(sorted(blocks), float), np.array([np.mean(blocks[k]) for k in sorted(blocks)])
    mean, half = float(y.mean()), len(x) // 2
    slope, t = fit_line(x, y)
    parts = [fit_line(x[part], y[part])[0] for part in (slice(half), slice(half, None))]
    shares = [each * 3600 / BLOCK_S / (mean or 1.0) for each in (slope, *parts)]
    return Slope(mean, shares[0], t, min(shares))


def fit_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of a line and the slope over its standard error."""
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    error = float(np.linalg.norm(y - slope * x)) / math.sqrt(max(len(x) - 2, 1) * float(x @ x))
    return slope, slope / error if error else math.copysign(math.inf, slope) if slope else 0.0


def sample(run_dir: Path, samples: Samples, end: threading.Event) -> None:
    """Record the resources of all processes of a run until its end."""
    while not end.wait(SAMPLE_S):
        now = time.monotonic()
        for name, pid in kills.find_pids(run_dir).items():
            with suppress(psutil.NoSuchProcess), (each := psutil.Process(pid)).oneshot():
                found = (each.memory_info().rss / 2**20, each.num_fds(), each.num_threads())
                samples[name, pid].append((now, *found))
        arenas = list(SHARED_MEMORY.glob(f"laminar-{run_dir.name}-*"))
        with suppress(FileNotFoundError):  # renamed or removed meanwhile
            samples["run", 0].append((now, sum(p.stat().st_blocks for p in arenas) / 2048))


def find_slopes(samples: Samples) -> Iterator[dict[str, Any]]:
    """Yield one line per process that lived long enough, and one for the shared memory."""
    for (name, pid), rows in sorted(samples.items()):
        times_s, *columns = zip(*rows, strict=True)
        minutes = round((times_s[-1] - times_s[0]) / 60, 1)
        line: dict[str, Any] = {"process": name, "pid": pid, "minutes": minutes, "grows": []}
        if name.startswith(Role.STORE):
            columns[0] = tuple(max(rss, columns[0][0] + PAGE_CACHE_MIB) for rss in columns[0])
        slopes = [fit_slope(times_s, column) for column in columns]
        for resource, slope in zip(RESOURCES if pid else ("shm",), slopes, strict=True):
            if slope is not None:
                percent = round(100 * slope.share_per_hour, 2)
                line[resource] = {"mean": round(slope.mean, 1), "percent_per_hour": percent,
                                  "t": str(round(slope.t, 1))}  # fmt: skip
                line["grows"] += [resource] if slope.is_growth() else []
        if None not in slopes:
            yield line


def soak(run_dir: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the run; return a line per process and one for all. Raise BadRun if it fails."""
    chance, faults, ready, load = random.Random(args.seed), 0, 0, list[float]()
    samples: Samples = defaultdict(list)
    end = threading.Event()
    with Run(run_dir, args.config, (*args.settings, "coordinator.heartbeat_ms=250")) as training:
        training.until_step(1)
        injector = kills.Injector(training, chance)
        threading.Thread(target=sample, args=(run_dir, samples, end), daemon=True).start()
        end_s = time.monotonic() + args.minutes * 60
        while time.monotonic() < end_s:
            step = training.step()
            if chance.random() < args.rate:
                kind = chance.choice(args.kinds.split(","))
                injector.strike(kind, chance.choice(kills.find_roles(training)))
                faults += 1
            training.until_step(step + 1)
            load.append(os.getloadavg()[0])
            ready = max(ready, read_json(run_dir / "status.json").get("groups_ready", 0))
        end.set()
        training.drain()
    check(run_dir)
    kills.check_leftovers(run_dir)
    lines = list(find_slopes(samples))
    args.growing = growing = [line["process"] for line in lines if line["grows"]]
    total = {"name": "soak", "faults": faults, "processes": len(lines), "growing": growing}
    mean = round(sum(load) / len(load), 1)
    return [*lines, total | {"groups_ready": ready, "load": mean, "cores": os.cpu_count()}]


def main() -> int:
    args = parse_arguments(__doc__ or "", minutes=55.0)
    args.growing = True
    return print_lines(soak, args) or bool(args.growing)


if __name__ == "__main__":
    sys.exit(main())
