"""How long a run takes from the command to its first step, and a replica from kill -9 to its work.

Usage: python tools/bench/start.py [--rounds 3] [SETTING=VALUE ...]
Prints one JSON line per figure: the median of the rounds, with all of them; seconds.

The quickstart's configuration is trained for a few steps; after the second one a replica is killed.
Times are those of the event log, so they are the coordinator's:

coordinator   from the command to the coordinator's first event: checks, trial of the reward, start
NAME_joined   from the command to the moment in which that process speaks
NAME_ready    ... in which it can work: data loaded, model loaded, engine there
version_0     ... in which the first replica has weights
dispatched    ... in which the first trajectory is in an engine
first_step    ... in which the first step is completed
cpu           of all processes of the whole run, twelve steps included: other work on the machine
              does not change it
again_joined, again_ready, again_serves   from the kill of a replica to its successor's first word,
              its engine, its weights
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.analysis.history import WallClock, records, typed_event  # noqa: E402
from laminar.eventlog.record import EventRecord  # noqa: E402
from laminar.events import events as ev  # noqa: E402

VICTIM = "rollout-1"
DEADLINE_S = 240.0
MOMENTS: dict[type, str] = {
    ev.CoordinatorStarted: "coordinator",
    ev.ActorJoined: "{}_joined",
    ev.DataLoaded: "{}_ready",
    ev.TrainerReady: "{}_ready",
    ev.RelayReady: "{}_ready",
    ev.ReplicaReady: "{}_ready",
    ev.WeightsLoaded: "version_0",
    ev.TrajectoryStarted: "dispatched",
    ev.StepCompleted: "first_step",
}
AGAIN: dict[type, str] = {
    ev.ActorJoined: "again_joined",
    ev.ReplicaReady: "again_ready",
    ev.WeightsLoaded: "again_serves",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as directory:
            for name, seconds in one_round(Path(directory), arguments.settings).items():
                found.setdefault(name, []).append(round(seconds, 2))
    for name, rounds in found.items():
        median = round(statistics.median(rounds), 2)
        print(json.dumps({"figure": name, "seconds": median, "rounds": rounds}), flush=True)


def one_round(directory: Path, settings: list[str]) -> dict[str, float]:
    """One run from its command to its end; what was seen, by name."""
    run = directory / "run"
    words = ["train", "-c", "configs/quickstart.toml", "trainer.total_training_steps=12"]
    words += [*settings, f"run.output_dir={directory}", "run.name=run"]
    begun_ns, begun_cpu = time.time_ns(), children_cpu()
    with subprocess.Popen(
        [sys.executable, "-m", "laminar.cli.main", *words], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        try:
            killed_ns = kill_a_replica(run)
            process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    return read_times(run, begun_ns, killed_ns) | {"cpu": children_cpu() - begun_cpu}


def children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def kill_a_replica(run: Path) -> int:
    """After the second step; when that was, in unix ns."""
    deadline = time.monotonic() + DEADLINE_S
    while (status := read_status(run)) is None or status["step"] < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no second step within {DEADLINE_S:.0f} s")
        time.sleep(0.05)
    os.kill(status["processes"][VICTIM], signal.SIGKILL)
    return time.time_ns()


def read_status(run: Path) -> dict[str, object] | None:
    try:
        return json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return None


def read_times(run: Path, begun_ns: int, killed_ns: int) -> dict[str, float]:
    """Each the first time that it happened, since the command or since the kill."""
    seen: dict[str, float] = {}
    clock = WallClock()
    for record in records(run):
        if not isinstance(record, EventRecord):
            continue
        stamped = typed_event(record)
        at_ns, kind = clock.unix_ns(stamped), type(stamped.event)
        if kind in MOMENTS:
            name = MOMENTS[kind].format(stamped.peer.replace("-", "_"))
            seen.setdefault(name, (at_ns - begun_ns) / 1e9)
        if stamped.peer != VICTIM or at_ns < killed_ns:
            continue
        if kind in AGAIN and ("again_joined" in seen or kind is ev.ActorJoined):
            seen.setdefault(AGAIN[kind], (at_ns - killed_ns) / 1e9)
    return seen


if __name__ == "__main__":
    main()
