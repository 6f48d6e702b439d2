"""Row 12: kill -9 of every role during a run; each is restarted, and the books are exact.

Reads   configs/recipes/words/run.toml
Gives   ROWS

A run must end with exit code 0, three books that agree, a log that replays and weights that can be
retrained from it (tools/bench/kills, which also measures how long each part took).
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

from laminar.names.roles import Role
from tools.bench.kills import killed_run as kills
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.real_run import BadRun

CONFIG = "configs/recipes/words/run.toml"
SMALL = (
    "trainer.save_freq=2",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=0",
    "trainer.total_training_steps=2000",  # stopped when the last process is back
)
ROLES: dict[Gate, tuple[str, ...]] = {
    "pr": (Role.TRAINER, Role.STORE, Role.NODE),
    "release": tuple(kills.ROLES),
}
RUNS: dict[Gate, int] = {"pr": 1, "release": 10}
EACH: dict[Gate, int] = {"pr": 1, "release": 5}


def run(gate: Gate) -> Figure:
    hit: Counter[str] = Counter()
    longest = 0.0
    for seed in range(RUNS[gate]):
        order = [role for role in ROLES[gate] for _ in range(EACH[gate])]
        random.Random(seed).shuffle(order)
        with tempfile.TemporaryDirectory() as directory:
            try:
                run_dir = Path(directory) / "run"
                passed = kills.run(run_dir, CONFIG, SMALL, order, seed, drained=True)
            except BadRun as error:
                return Figure(f"{_said(hit)}; run {seed} failed", False, str(error))
        hit.update(kill.role for kill in passed.kills)
        times = (kills.times(kill, passed.log.events) for kill in passed.kills)
        longest = max(longest, *(found.get("next_step_s", 0.0) for found in times))
    return Figure(f"{_said(hit)}; books exact, the next step after at most {longest:.1f} s", True)


def _said(hit: Counter[str]) -> str:
    return ", ".join(f"{role} {count}" for role, count in sorted(hit.items())) or "none"


ROWS = (
    Row(
        12,
        "kill -9 of each role while a job runs",
        "trainer, store and node, in one run",
        "50 of each, ledger exact",
        run,
    ),
)
