"""How long does a repack take, from the plan until its work goes on elsewhere? In real processes.

Usage: python tools/bench/hand_over.py [--replicas 4] [--steps 30] [key=value ...]
Prints one JSON line per figure; exits 1 when nothing moved, a source did not answer in time, or a
hand-over took longer than LIMIT_S.

An emulated run (docs/engines.md) with a process for each replica and a long tail of answers.

release_s          from the order to the source until its tokens are stored and the work is placed
control_s          from the same order until all of it has been opened at the store by its
                   destination: the source takes new work then
prefill_s          that the destination's engine needs for what it was given, apart from the above;
                   emulated: tokens by emulation.prefill_tokens_per_s
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.analysis.course import Course  # noqa: E402
from laminar.analysis.history import replay_log  # noqa: E402
from laminar.analysis.repack_book import HandOver  # noqa: E402
from laminar.cli.arguments import run_config  # noqa: E402

LIMIT_S = 0.69
"""What the paper's Table 1 has for a repack."""
SETTINGS = [
    "rollout.engine=emulated",
    "rollout.group_size=8",
    "rollout.max_num_seqs=64",
    "data.dataset_size=4000",
    "data.val_size=0",
    "data.max_prompt_length=256",
    "data.max_response_length=4096",
    "data.train_batch_size=16",
    "async.max_staleness=4",
    "emulation.step_us=8000",
    "emulation.median_response=150",
    "emulation.train_s=1",
    "repack.policy=best-fit",
    "repack.interval_ms=1000",
]


def laminar(*words: str) -> int:
    command = [sys.executable, "-m", "laminar.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode


def tell(name: str, value: Any) -> None:
    print(json.dumps({"name": name, "value": value, "kind": "emulated"}), flush=True)


def spread(values: list[float]) -> dict[str, float]:
    points = {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 99)}
    return {**points, "max": round(max(values), 4)}


def report(run_dir: Path) -> int:
    course = Course()
    replay_log(run_dir, course)
    found: list[HandOver] = [h for h in course.repack.hand_overs if h.freed and h.placed]
    rate = run_config(run_dir).emulation.prefill_tokens_per_s
    expired = sum(h.expired for h in found)
    tell("hand_overs", {"count": len(found), "moves": sum(h.moves for h in found)})
    tell("expired", expired)
    if not found:
        return 1
    tell("release_s", spread([_seconds(h.ordered, h.placed) for h in found]))
    control = [_seconds(h.ordered, h.freed) for h in found]
    tell("control_s", {**spread(control), "limit": LIMIT_S})
    tell("prefill_s", spread([h.prefilled / rate for h in found]))
    return int(expired > 0 or max(control) > LIMIT_S)


def _seconds(begin: Any, end: Any) -> float:
    return float(end.unix_ns - begin.unix_ns) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        size = [
            f"rollout.replicas={arguments.replicas}",
            f"trainer.total_training_steps={arguments.steps}",
            f"run.output_dir={directory}",
            "run.name=run",
        ]
        if laminar("train", *SETTINGS, *size, *arguments.settings):
            sys.exit("the run failed")
        return report(Path(directory) / "run")


if __name__ == "__main__":
    sys.exit(main())
