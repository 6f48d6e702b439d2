"""Rows 11 to 14, 18, 19 and 28: faults of the processes of a run, and its upgrade.

Reads   configs/recipes/words/run.toml for row 12; configs/emulated_4.toml: engines, trainer,
        prompts and rewards are emulated
Gives   ROWS

Each run must end with exit code 0, books that agree, a log that replays and weights that can be
retrained from it, and leave no process, lock or shared memory (tools/bench/kills).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from laminar.names.roles import Role
from tools.bench import soak
from tools.bench.ettr import EMULATED, SCALED, SMALL
from tools.bench.kills import killed_run as kills
from tools.bench.kills.__main__ import sampled
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.real_run import ROOT, BadRun, Run, check, read_json

CONFIG = "configs/emulated_4.toml"
TINY = (
    "data.train_batch_size=4", "trainer.save_freq=2", "coordinator.node_lease_ms=6000",
    "recovery.max_restarts=99", "recovery.restart_window_s=60",
)  # fmt: skip
REAL = (
    "configs/recipes/words/run.toml", "trainer.save_freq=2", "trainer.test_freq=0",
    "data.train_batch_size=4", "data.val_size=0", "trainer.total_training_steps=2000",
)  # fmt: skip
STOPPED = (Role.ROLLOUT, Role.RELAY, Role.STORE, Role.TRAINER, Role.NODE)
DEATHS = 20  #: of the coordinator, within the limit for one run
LEAST = 1 - 0.25 - 0.05  #: tokens per second with one of four replicas slow or dead
SLOW_TRAINER = (*TINY, "emulation.train_s=10")  #: ten times slower
BATCHES = 3  #: that may wait: async.max_staleness is 2
OTHER_RELEASE = "0.1.0"
MINUTES: dict[Gate, float] = {"pr": 2.0, "release": 30.0}


def strike(
    kinds: str,
    *roles: str,
    each: int,
    rate: float = 1.0,
    run: tuple[str, ...] = (CONFIG, *TINY),
    seed: int = 0,
) -> tuple[kills.Passed, list[float]]:
    """Make a run with these faults; return it, and the rate of tokens while each lasted."""
    order = [(kind, role) for kind in kinds.split(",") for role in roles for _ in range(each)]
    random.Random(seed).shuffle(order)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / f"faults{os.getpid()}"  # alone in /dev/shm
        passed = kills.run(run_dir, run[0], run[1:], order, seed, drained=True, rate=rate)
        return passed, [sampled(run_dir, kill, max(kill.lasted_s, 5.0)) for kill in passed.kills]


def kill_roles(gate: Gate) -> Figure:
    roles = (Role.TRAINER, Role.STORE, Role.NODE) if gate == "pr" else kills.ROLES
    runs, each = {"pr": (1, 1)}.get(gate, (10, 5))
    passed = [strike("kill", *roles, each=each, run=REAL, seed=seed)[0] for seed in range(runs)]
    hit = Counter(kill.role for one in passed for kill in one.kills)
    times = [kills.times(kill, one.log.events) for one in passed for kill in one.kills]
    longest = max(found.get("next_step_s", 0.0) for found in times)
    said = ", ".join(f"{role} {count}" for role, count in sorted(hit.items()))
    return Figure(f"{said}; books exact, the next step after at most {longest:.1f} s", True)


def fail_calls(gate: Gate) -> Figure:
    if not shutil.which("strace"):
        return Figure("skipped: the command strace is missing (package strace)", True)
    runs = [
        strike("disk", Role.COORDINATOR, each=DEATHS, rate=0.2)
        for _ in range({"pr": 1}.get(gate, 15))
    ]
    points = sum(len(passed.kills) for passed, _ in runs)
    what = "writes and syncs of the log failed (EIO, ENOSPC) or were the last (SIGKILL)"
    return Figure(f"{points} {what}; 0 acknowledged lost: books agree, log replays", True)


def restart_coordinator(gate: Gate) -> Figure:
    took_s, events = [], 0
    for _ in range({"pr": 1}.get(gate, 5)):
        passed, _ = strike("kill", Role.COORDINATOR, each=DEATHS // 2, rate=0.1)
        log = passed.log
        events, times = max(events, len(log.events)), {told.seq: told.at_ns for told in log.events}
        for kill in passed.kills:
            back = next(t.seq for t in log.events if t.at_ns > kill.at_ns and t.peer == kill.name)
            first = next(cause for cause, _ in log.orders if cause >= back)
            took_s.append((times[first] - kill.at_ns) / 1e9)
    median = sorted(took_s)[len(took_s) // 2]
    return Figure(
        f"{len(took_s)} kills, at most {max(took_s):.1f} s, median {median:.1f} s; "
        f"logs of up to {events} events",
        max(took_s) <= {"pr": 3.0}.get(gate, 2.0),
        str(took_s),
    )


def stop_processes(gate: Gate) -> Figure:
    passed, _ = strike("stop", *STOPPED, each={"pr": 2}.get(gate, 20))
    told = [kills.times(fault, passed.log.events) for fault in passed.kills]
    declared = sum("noticed_s" in times for times in told)
    return Figure(
        f"{len(told)} processes stopped, {declared} of them declared lost and replaced; 0 effects "
        "of their late messages: books agree, log replays, nothing left behind",
        True,
    )


def slow_replica(gate: Gate) -> Figure:
    passed, rates = strike("slow,kill", Role.ROLLOUT, each={"pr": 3}.get(gate, 15), rate=0.05)
    kinds = [fault.kind for fault in passed.kills]
    means = {
        kind: sum(rate for rate, of in zip(rates, kinds, strict=True) if of == kind) / count
        for kind in dict.fromkeys(kinds) if (count := kinds.count(kind))
    }  # fmt: skip
    return Figure(
        f"emulated: with one of four replicas ten times slower {means['slow']:.0%} of the tokens/s "
        f"of the 20 s before, with one dead (5 s) {means['kill']:.0%}; {len(kinds)} faults",
        min(means.values()) >= LEAST,
        str(rates),
    )


def bound_memory(gate: Gate) -> Figure:
    config, settings = (CONFIG, SLOW_TRAINER) if gate == "pr" else (EMULATED, (*SMALL, *SCALED))
    args = argparse.Namespace(
        config=config, settings=settings, minutes=MINUTES[gate], kinds="kill,stop,slow", rate=0.1,
        seed=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        *lines, total = soak.soak(Path(directory) / f"soak{os.getpid()}", args)
    most, limit = total["groups_ready"], BATCHES * 4
    said = f"{MINUTES[gate]:g} min, {total['faults']} faults: "
    if gate == "pr":
        said += f"trainer ten times slower, at most {most} groups wait, limit {limit}"
        return Figure(said, most <= limit)
    said += f"{len(total['growing'])} of {len(lines)} processes grow (rss, fds, threads, shm)"
    return Figure(said, not total["growing"], str(total["growing"]))


def upgrade(gate: Gate) -> Figure:
    """Begin runs with another release, stop them, and resume them with this one."""
    runs, settings = {"pr": 1}.get(gate, 10), (*TINY, "trainer.total_training_steps=20")
    for number in range(runs):
        with tempfile.TemporaryDirectory() as directory:
            run_dir = Path(directory) / f"upgraded{os.getpid()}-{number}"
            program = copy_release(Path(directory))
            with Run(run_dir, str(ROOT / CONFIG), settings, program=program) as training:
                training.drain()
                if code := training.end():
                    raise BadRun(f"exit code {code}: {training.said()}")
                before = training.step()
                training.program = ROOT
                training.resume()
            if not 0 < before < read_json(run_dir / "status.json")["step"] == 20:
                raise BadRun(f"stopped at step {before}, then {training.said()}")
            check(run_dir)
    done = "stopped in the middle and resumed with this code; all steps done, books agree"
    return Figure(f"{runs} of release {OTHER_RELEASE}, {done}, log replays", True)


def copy_release(directory: Path) -> Path:
    """Copy the package there under another release number; its decisions are the same."""
    shutil.copytree(ROOT / "laminar", directory / "laminar")
    (directory / "laminar/names/version.py").write_text(f'__version__ = "{OTHER_RELEASE}"\n')
    return directory


ROWS = (
    Row(11, "real system-call faults on laminar-coord", "20 points", "300 points, 0 acked lost",
        fail_calls),
    Row(12, "kill -9 of each role while a job runs", "trainer, store and node, in one run",
        "50 of each, ledger exact", kill_roles),
    Row(13, "coordinator restart, kill to first command", "p99 <= 3 s", "p99 <= 2 s",
        restart_coordinator),
    Row(14, "zombies: stopped for 1.5 to 5 leases", "10", "100, 0 effects", stop_processes),
    Row(18, "slow and dead nodes cost only their share", "loss <= share + 5 points, 3 of each",
        "loss <= share + 5 points, 15 of each", slow_replica),
    Row(19, "bounded memory", "queues <= limits", "RSS slope < 1 %/h", bound_memory),
    Row(28, "upgrade during a run", "1 run, ledger exact", "10 runs, ledger exact", upgrade),
)  # fmt: skip
