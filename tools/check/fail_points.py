"""Kill a process at each place that laminar/names/failpoint_names.py names, in real runs, and check
them.

Usage: python tools/check/fail_points.py [--only POINT ...] [--keep DIR] [SETTING=VALUE ...]
Prints one JSON line per run; exits 1 when a point was not reached or a run is not sound.

Each run is the quickstart's model, or for calls of tools the calculator's, with a checkpoint after
every second step, and dies at several places, each once. Some places are reached only after a death
at another one, so those stand together. A run is sound when it completes, every point has killed
its process, the log replays to the same decisions, the three books agree, and what was trained
gives the same weights again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.names.failpoint_names import LEARNER, POINTS, RANK  # noqa: E402
from laminar.run.fail_points import VARIABLE  # noqa: E402

RUNS: tuple[dict[str, int], ...] = (
    {
        "trainer-fetch": 3,
        "rollout-append": 4,
        "store-commit": 50,
        "coordinator-durable": 200,
        "reward-call": 30,
    },
    {
        "trainer-step": 4,
        "trainer-load": 1,
        "rollout-appended": 3,
        "store-committed": 60,
        "relay-digest": 3,
    },
    {
        "trainer-optimizer": 4,
        "trainer-repeat": 1,
        "rollout-finished": 10,
        "store-end": 2,
        "coordinator-received": 300,
    },
    {
        "trainer-copy": 3,
        "rollout-score": 5,
        "store-ended": 3,
        "relay-digested": 3,
        "coordinator-sent": 200,
    },
    {
        "trainer-book": 3,
        "trainer-checkpoint": 1,
        "rollout-rewarded": 6,
        "reward-scored": 20,
        "coordinator-replayed": 1,
    },
    {
        "trainer-checkpoint-named": 2,
        "trainer-export": 1,
        "rollout-leased": 3,
        "relay-ready": 1,
        "store-filled": 1,
    },
    {"node-launched": 5, "rollout-loaded": 3, "node-child-ended": 1},
    {"policy-update": 3, "critic-update": 4},
    {
        "rollout-noted": 9,
        "rollout-called": 14,
    },
    {"rank-load": 1, "rank-step": 3, "rank-fill": 2, "rank-write": 1},
)
"""By point: the how manieth time a process reaches it."""
SETTINGS = (
    "trainer.total_training_steps=6",
    "trainer.save_freq=2",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=2000",
    "run.name=run",
)
RANKS = ("trainer.ranks=2", "recovery.max_restarts=9")
"""Of runs in which another rank of the trainer dies."""
CRITIC = ("algorithm.adv_estimator=gae", "critic.lr=1e-3", "trainer.critic_warmup=1")
"""Of runs in which the trainer dies in one half of a step of PPO."""
CALLS = ("rollout-noted", "rollout-called")
RUN_TIMEOUT_S, CHECK_TIMEOUT_S = 900.0, 300.0
CHECKS = (("log", "replay"), ("audit",), ("retrain",))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    only = {"nargs": "+", "choices": POINTS, "metavar": "POINT", "default": list(POINTS)}
    parser.add_argument("--only", **only, help="runs with these, and what they need")  # type: ignore[arg-type]
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs there")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    arguments = parser.parse_args()
    ok = True
    with tempfile.TemporaryDirectory() as directory:
        parent = arguments.keep or Path(directory)
        for number, points in enumerate(RUNS):
            if points.keys() & set(arguments.only):
                found = one_run(parent / f"{number}", points, arguments.settings)
                print(json.dumps(found), flush=True)
                ok &= found["ok"]
    sys.exit(0 if ok else 1)


def one_run(parent: Path, points: dict[str, int], settings: list[str]) -> dict[str, Any]:
    """What became of it; `problems` are empty where it is sound."""
    wanted = ",".join(f"{point}:{number}" for point, number in points.items())
    ranks = RANKS if points.keys() & set(RANK) else ()
    critic = CRITIC if points.keys() & set(LEARNER) else ()
    config = "calculator" if points.keys() & set(CALLS) else "quickstart"
    words = ["train", "-c", f"configs/{config}.toml", *SETTINGS, *ranks, *critic, *settings]
    began = time.monotonic()
    code, said = laminar([*words, f"run.output_dir={parent}"], RUN_TIMEOUT_S, {VARIABLE: wanted})
    seconds = time.monotonic() - began
    run, problems = parent / "run", []
    if code:
        problems.append(f"the run ended with {code}: {said[-2000:]}")
    problems += [
        f"{point} was not reached {number} times"
        for point, number in points.items()
        if not (run / f"failed-{point}-{number}").exists()
    ]
    for check in CHECKS:
        code, said = laminar([*check, str(run)], CHECK_TIMEOUT_S, {})
        if code:
            problems.append(f"laminar {' '.join(check)} ended with {code}: {said[-1000:]}")
    facts = {"points": wanted, "seconds": round(seconds, 1), "problems": problems}
    return {**facts, "ok": not problems}


def laminar(words: list[str], timeout_s: float, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command."""
    command = [sys.executable, "-m", "laminar.cli.main", *words]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        return 124, f"no end within {timeout_s:g} s: {late.stdout!r}"
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    main()
