"""Kill a process at every failpoint of laminar/names/failpoint_names.py and check the real run.

Usage: python tools/check/fail_points.py [--only POINT ...] [--keep DIR] [SETTING=VALUE ...]
Prints one JSON line per run; exits 1 when a point was not reached or a run is not sound.

Each run trains the quickstart's model, or the calculator's for failpoints in tool calls, saves a
checkpoint after every second step, and dies once at each of several failpoints. Failpoints that are
reached only after a death at another one share a run with it. A run is sound if it completes, every
failpoint killed its process, the log replays to the same decisions, the three books agree, and
retraining reproduces the weights.
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
    {"rollout-noted": 9, "rollout-called": 14},
    {"rank-load": 1, "rank-step": 3, "rank-fill": 2, "rank-write": 1},
)
"""Number of the visit at which each failpoint kills its process, by run."""
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
"""Settings of runs in which a trainer rank other than 0 dies."""
CRITIC = ("algorithm.adv_estimator=gae", "critic.lr=1e-3", "trainer.critic_warmup=1")
"""Settings of runs in which the trainer dies in the policy or critic half of a PPO step."""
CALLS = ("rollout-noted", "rollout-called")
RUN_TIMEOUT_S, CHECK_TIMEOUT_S = 900.0, 300.0
CHECKS = (("log", "replay"), ("audit",), ("retrain",))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    only = {"nargs": "+", "choices": POINTS, "metavar": "POINT", "default": list(POINTS)}
    parser.add_argument("--only", **only, help="only runs with these failpoints")  # type: ignore[arg-type]
    parser.add_argument("--keep", type=Path, metavar="DIR", help="directory that keeps the runs")
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
    """Run a training with these failpoints and return its facts; `problems` is empty if sound."""
    wanted = ",".join(f"{point}:{number}" for point, number in points.items())
    ranks = RANKS if points.keys() & set(RANK) else ()
    critic = CRITIC if points.keys() & set(LEARNER) else ()
    recipe = "calculator" if points.keys() & set(CALLS) else "words"
    config = f"configs/recipes/{recipe}/run.toml"
    words = ["train", "-c", config, *SETTINGS, *ranks, *critic, *settings]
    began = time.monotonic()
    code, said = laminar([*words, f"run.output_dir={parent}"], RUN_TIMEOUT_S, {VARIABLE: wanted})
    seconds = time.monotonic() - began
    run, problems = parent / "run", []
    if code:
        problems.append(f"the run ended with {code}: {said[-2000:]}")
    problems += [
        f"{point} was reached fewer than {number} times"
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
    """Run a `laminar` command and return its exit code and output."""
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
        return 124, f"timed out after {timeout_s:g} s: {late.stdout!r}"
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    main()
