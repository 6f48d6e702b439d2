"""Rows 1, 3, 6, 16, 17 and 22: thousands of simulated runs with faults.

Reads   configs/sim_small.toml
Gives   ROWS; all rows share one swarm of runs

Every run checks itself during the run (tools/simulator/checks/safety.py) and at its end
(final_checks.py): the invariants, the two books, and the replay of its log from the first event and
from each snapshot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

from tools.check.rows.base import Figure, Gate, Row
from tools.simulator.config import Choices, load
from tools.simulator.coverage import EXPECTED, Coverage
from tools.simulator.faults.faults import KINDS, WEATHER
from tools.simulator.run import Outcome, run_seeds, story

ROOT = Path(__file__).resolve().parents[3]
SMALL = ROOT / "configs" / "sim_small.toml"
FIXED: dict[Gate, range] = {"pr": range(1, 301), "release": range(1, 20_001)}
JOBS = 2
PROGRESS_S = 30.0
HASH_SEEDS = ("0", "1", "4242")
HASHED_RUNS: dict[Gate, tuple[int, ...]] = {"pr": (3, 14), "release": (3, 14, 15, 92, 65)}
MARKS_PART = 0.9
MARKS_HITS = 10
TRAJECTORIES = 1_000_000
REPLAY_SECONDS = 20.0


class Swarm:
    """Totals of many simulated runs."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.runs = self.events = self.trajectories = self.replays = self.failed = 0
        self.broken: list[Outcome] = []
        self.coverage = Coverage()
        self.faults = Counter[str]()

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.events += outcome.events
        self.trajectories += outcome.trajectories
        self.replays += outcome.replays
        self.failed += bool(outcome.failure)
        self.coverage.merge(outcome.coverage)
        self.faults.update(outcome.faults)
        if outcome.invariant:
            self.broken.append(outcome)

    def detail(self) -> str:
        """Describe the first broken runs, with the command that repeats each."""
        lines = []
        for outcome in self.broken[:5]:
            lines += [f"seed {outcome.seed} broke {outcome.invariant}: {outcome.details}"]
            lines += [f"  {line}" for line in story(self.choices, outcome)[-10:]]
            again = f"-c configs/{SMALL.name} --seed {outcome.seed} --events"
            lines += [f"  python -m tools.simulator {again}"]
        return "\n".join(lines)


def fresh_seeds(count: int, commit: str) -> range:
    """Return `count` seeds that belong to a commit: always the same, and not another's."""
    first = FIXED["release"].stop + 100_000 * int(commit[:8] or "0", 16)
    return range(first, first + count)


def use_fresh(count: int) -> None:
    """Use seeds of the current commit instead of the fixed ones."""
    FIXED["pr"] = FIXED["release"] = fresh_seeds(count, _commit())


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


@cache
def swarm(gate: Gate) -> Swarm:
    """Run the seeds of a gate, once per process."""
    config, chosen = load(SMALL, KINDS), FIXED[gate]
    found, shown = Swarm(config), time.monotonic()
    for outcome in run_seeds(config, chosen, JOBS):
        found.add(outcome)
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            progress = f"{found.runs} of {len(chosen)} runs, {len(found.broken)} broken"
            print(progress, file=sys.stderr, flush=True)
    return found


def fault_schedules(gate: Gate) -> Figure:
    runs = swarm(gate)
    reached = (
        f"{runs.runs:,} seeds, {runs.events:,} events, {len(runs.broken)} violations, "
        f"{runs.failed} ended early by a loss, as expected"
    )
    return Figure(reached, not runs.broken, runs.detail())


def replay(gate: Gate) -> Figure:
    """Compare decisions replayed from the first event, every snapshot and under every hash seed."""
    runs = swarm(gate)
    different = [outcome for outcome in runs.broken if outcome.invariant == "replay_equal"]
    answers = {hash_seed: _runs_under(hash_seed, gate) for hash_seed in HASH_SEEDS}
    same = len(set(answers.values())) == 1
    reached = (
        f"{runs.replays:,} replays of {runs.runs:,} runs (all snapshots), {len(different)} "
        f"differ; {len(HASH_SEEDS)} hash seeds agree: {'yes' if same else 'no'}"
    )
    passed = same and not different
    if gate == "release":
        seconds = _replay_of_a_million()
        reached += f"; a million events replay in {seconds:.1f} s"
        passed = passed and seconds <= REPLAY_SECONDS
    return Figure(reached, passed, json.dumps(answers, indent=1) if not same else runs.detail())


def _runs_under(hash_seed: str, gate: Gate) -> str:
    """Return the simulator's output for a few runs, which has the digest of the last state."""
    found = ""
    for seed in HASHED_RUNS[gate]:
        found += subprocess.run(
            [sys.executable, "-m", "tools.simulator", "-c", str(SMALL), "--seed", str(seed)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return found


def _replay_of_a_million() -> float:
    bench = [sys.executable, "-m", "tools.bench.core.replay", "--replicas", "16"]
    printed = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    figures = {row["name"]: row["value"] for row in map(json.loads, printed.splitlines())}
    return float(figures["replay_seconds_per_million"])


def marks(gate: Gate) -> Figure:
    counts = swarm(gate).coverage.counts
    least = 1 if gate == "pr" else MARKS_HITS
    short = {name: counts.get(name, 0) for name in EXPECTED if counts.get(name, 0) < least}
    hit = len(EXPECTED) - len(short)
    part = hit / len(EXPECTED)
    often = "" if least == 1 else f" at least {least} times"
    reached = f"{hit} of {len(EXPECTED)} marks hit{often} ({part:.1%})"
    passed = part >= MARKS_PART if gate == "pr" else not short
    return Figure(reached, passed, "\n".join(f"{count}  {name}" for name, count in short.items()))


def weather(gate: Gate) -> Figure:
    runs = swarm(gate)
    counts = ", ".join(f"{runs.faults[kind]:,} with {kind}" for kind in WEATHER)
    passed = not runs.broken and all(runs.faults[kind] for kind in WEATHER)
    return Figure(f"simulated: {counts}; {len(runs.broken)} violations", passed, runs.detail())


def clock_steps(gate: Gate) -> Figure:
    runs = swarm(gate)
    count = runs.faults["clock-step"]
    wrong = [o for o in runs.broken if "clock-step" in o.faults]
    return Figure(
        f"simulated: {count:,} runs with clock steps, {len(wrong)} broken", count > 0 and not wrong
    )


def exactly_once(gate: Gate) -> Figure:
    runs = swarm(gate)
    wrong = [o for o in runs.broken if o.invariant in ("two_books", "at_most_one_trained")]
    reached = f"{runs.trajectories:,} simulated trajectories, {len(wrong)} differences"
    enough = gate == "pr" or runs.trajectories >= TRAJECTORIES
    return Figure(reached, enough and not wrong, runs.detail())


ROWS = (
    Row(
        1,
        "simulated fault schedules, 4 to 16 replicas",
        "300 seeds, 0 violations; 2,000 new seeds before an issue is closed",
        "20,000 seeds, 0 violations (200,000 over time)",
        fault_schedules,
    ),
    Row(
        3,
        "replay: the same decisions, byte for byte",
        "every simulated run; 3 hash seeds",
        "from every snapshot; a million events in 20 s",
        replay,
    ),
    Row(
        6,
        "rare code paths are executed",
        "90 % of the marks, with 1,000 seeds or more",
        "100 %, 10 times each",
        marks,
    ),
    Row(16, "duplicates, reorder, loss, corruption", "in row 1", "1 h with a real proxy", weather),
    Row(
        17,
        "exactly once: ledger, store and trainer agree",
        "0 differences",
        "0 in 1 M simulated trajectories, 10 k real",
        exactly_once,
    ),
    Row(22, "clock steps of an hour", "3 runs", "20 runs, no lease error", clock_steps),
)
