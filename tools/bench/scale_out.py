"""Load test of the control plane: an emulated run of many replicas with a coordinator kill.

Usage: python -m tools.bench.scale_out [-c configs/emulated_256.toml] [--seconds 300]
           [key=value ...]
Prints one JSON line per figure; exits 1 if the run fails, its books do not agree or its log does
not replay.

The processes, sockets, files and shared memory are those of a real run; engines, trainer, prompts
and rewards are emulated (docs/engines.md). After half of --seconds, counted from the first weights,
the coordinator gets SIGKILL; at the end `laminar stop` ends the run gracefully.

cpu_percent        of one core, by role, between the first weights and the end
log_bytes_per_s    growth of the event log in that time; events_per_s
event_to_command   from the log line with which a process reports an event to the arrival of the
                   pull-weights that the event caused, mostly in another process; ms
event_to_start     the same to the start of a trajectory that the event caused: after one commit of
                   the store and all earlier requests to it; ms
                   both from the first step on, without events reported while no coordinator lived
away_s             from the kill until the first event of the next coordinator
load               load on the machine: mean of the one-minute load average, cores
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.process_logs import log_lines
from laminar.analysis.log.run_log import parse_command, parse_event, read_records
from laminar.analysis.log.timeline import read_spans
from laminar.eventlog.record import DecisionRecord, EventRecord
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.real_run import ROOT, Run, laminar, read_json

POLL_S = 0.5
END_S = 300.0


def tell(name: str, value: Any) -> None:
    print(json.dumps({"name": name, "value": value, "kind": "emulated"}), flush=True)


class Meter:
    """CPU seconds of the processes of a run, including those that have ended."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._first: dict[int, tuple[str, float]] = {}
        self._last: dict[int, float] = {}
        self._began = self._ended = time.monotonic()
        self._bytes = self._log_bytes()
        self._load: list[float] = []

    def look(self) -> None:
        status = read_json(self._run_dir / "status.json")
        pids = {pid: name.partition("-")[0] for name, pid in status.get("processes", {}).items()}
        pids[read_json(self._run_dir / "coordinator.json").get("pid", 0)] = "coordinator"
        for pid, role in pids.items():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            used = times.user + times.system
            new = time.monotonic() - self._began > 2 * POLL_S and pid not in self._first
            self._first.setdefault(pid, (role, 0.0 if new else used))
            self._last[pid] = used
        self._load.append(os.getloadavg()[0])
        self._ended = time.monotonic()

    def figures(self) -> Iterator[tuple[str, Any]]:
        seconds = self._ended - self._began
        used: dict[str, float] = defaultdict(float)
        for pid, (role, before) in self._first.items():
            used[role] += self._last[pid] - before
        yield "seconds", round(seconds, 1)
        yield "cpu_percent", {role: round(100 * s / seconds, 1) for role, s in used.items()}
        yield "log_bytes_per_s", round((self._log_bytes() - self._bytes) / seconds)
        cores = os.cpu_count()
        yield "load", {"mean": round(sum(self._load) / len(self._load), 1), "cores": cores}

    def _log_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self._run_dir / "events").glob("events-*"))


@dataclass
class History:
    """Times from the log and the processes, on one clock."""

    reported: dict[int, int] = field(default_factory=dict)  #: unix ns of the report, by event
    pulls: list[tuple[int, int]] = field(default_factory=list)  #: (causing event, arrival)
    starts: list[tuple[int, int]] = field(default_factory=list)
    handled: list[int] = field(default_factory=list)  #: unix ns of each event, by the coordinator
    back_ns: int = 0  #: start of the second coordinator
    first_step_ns: int = 0


def read_history(run_dir: Path) -> History:
    """Match the n-th report of a kind by a process with its n-th such event in the log.

    Events are neither lost nor reordered, so the match is exact.
    """
    found, clock = History(), WallClock()
    lines: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in log_lines(run_dir):
        lines[line.process, line.name].append(line.unix_ns)
        if line.name == "trajectory-started":
            found.starts.append((line.event_seq, line.unix_ns))
    seen: Counter[tuple[str, str]] = Counter()
    pulls: dict[str, list[int]] = defaultdict(list)
    coordinators = 0
    for record in read_records(run_dir):
        if isinstance(record, DecisionRecord):
            command = parse_command(record)
            if isinstance(command, cmd.PullWeights):
                pulls[command.to].append(record.cause)
        elif isinstance(record, EventRecord):
            event = parse_event(record)
            now = clock.unix_ns(event)
            found.handled.append(now)
            key = (event.peer, str(event.event.__struct_config__.tag))
            if seen[key] < len(lines[key]):
                found.reported[event.seq] = lines[key][seen[key]]
            seen[key] += 1
            if isinstance(event.event, ev.CoordinatorStarted):
                coordinators += 1
                found.back_ns = now if coordinators == 2 else found.back_ns
            elif isinstance(event.event, ev.StepCompleted):
                found.first_step_ns = found.first_step_ns or now
    for replica, causes in pulls.items():
        spans = [span for span in read_spans(run_dir, replica) if span.state == "pulling"]
        found.pulls += [(c, span.start_ns) for c, span in zip(causes, spans, strict=False)]
    return found


def latencies(found: History, pairs: list[tuple[int, int]], killed_ns: int) -> dict[str, Any]:
    """Summarize the milliseconds from the report of the cause to the arrival."""
    taken = [
        (arrived - reported) / 1e6
        for cause, arrived in pairs
        if (reported := found.reported.get(cause)) is not None
        and reported >= found.first_step_ns
        and not killed_ns - 1e8 <= reported <= found.back_ns
    ]
    if not taken:
        return {"samples": 0}
    points = {f"p{q}": round(float(np.percentile(taken, q)), 1) for q in (50, 90, 99)}
    return {"samples": len(taken), **points, "max": round(max(taken), 1)}


def run(config: str, seconds: float, settings: list[str], run_dir: Path) -> int:
    training, killed_ns = Run(run_dir, config, settings), 0
    try:
        training.until(
            lambda: read_json(run_dir / "status.json").get("newest_version", -1) >= 0, "weights"
        )
        meter, began, train = Meter(run_dir), time.monotonic(), training.train
        while (passed := time.monotonic() - began) < seconds and train.poll() is None:
            meter.look()
            if not killed_ns and passed >= seconds / 2:
                os.kill(read_json(run_dir / "coordinator.json")["pid"], signal.SIGKILL)
                killed_ns = time.time_ns()
            time.sleep(POLL_S)
        figures = list(meter.figures())
        if train.poll() is None:
            subprocess.run(laminar("stop", str(run_dir)), cwd=ROOT, timeout=END_S)
        code = training.end()
    finally:
        training.close()
    for name, value in figures:
        tell(name, value)
    return report(run_dir, killed_ns, code)


def report(run_dir: Path, killed_ns: int, code: int) -> int:
    summary = read_json(run_dir / "summary.json")
    kept = ("steps", "trajectories_trained", "weight_versions", "tokens_per_s", "staleness_max")
    tell("run", {"exit_code": code, **{key: summary.get(key) for key in kept}})
    found = read_history(run_dir)
    span_s = (found.handled[-1] - found.handled[0]) / 1e9
    tell("events_per_s", round(len(found.handled) / span_s, 1))
    tell("event_to_command", latencies(found, found.pulls, killed_ns))
    tell("event_to_start", latencies(found, found.starts, killed_ns))
    tell("away_s", round((found.back_ns - killed_ns) / 1e9, 2))
    failed = code
    for words in (("audit",), ("log", "replay")):
        began = time.monotonic()
        done = subprocess.run(
            laminar(*words, str(run_dir)), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        last = done.stdout.strip().splitlines()[-1:]
        tell(" ".join(words), {"said": last, "seconds": round(time.monotonic() - began, 1)})
        failed = failed or done.returncode
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-c", "--config", default="configs/emulated_256.toml")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--keep", type=Path, help="run directory to keep")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = arguments.keep or Path(directory) / "emulated"
        return run(arguments.config, arguments.seconds, arguments.settings, run_dir.absolute())


if __name__ == "__main__":
    sys.exit(main())
