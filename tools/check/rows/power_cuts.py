"""Row 29: all processes of a run are killed at once and the run is resumed; books are exact.

Reads   configs/recipes/words/run.toml
Gives   ROWS; to run a number of cuts: python -m tools.check.rows.power_cuts TIMES

tools/bench/power_cuts.py makes the checks against the log, the store and the weights of the run.
After the last cut the run resumes with one more step and one more replica.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tools.bench import power_cuts
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.real_run import BadRun

CONFIG = "configs/recipes/words/run.toml"
SMALL = (
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=0",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=0",
    "trainer.total_training_steps=2000",  # stopped once it has resumed after the last cut
)
LAST = ("trainer.total_training_steps=2001", "rollout.replicas=3")
CUTS: dict[Gate, int] = {"pr": 1, "release": 20}


def run(gate: Gate) -> Figure:
    return cut(CUTS[gate])


def cut(cuts: int) -> Figure:
    with tempfile.TemporaryDirectory() as directory:
        try:
            run_dir = Path(directory) / "run"
            watch = power_cuts.run(run_dir, CONFIG, SMALL, cuts, 0, last=LAST, drained=True)
        except BadRun as error:
            return Figure(f"{cuts} cuts not completed", False, str(error))
    resumed = sum(one.resumed for one in watch.cuts)
    over = sum(one.started_over for one in watch.cuts)
    longest = max(one.next_step_s for one in watch.cuts)
    return Figure(
        f"{cuts} times; {len(watch.ended)} responses ended once each, {resumed} continued from "
        f"tokens, {over} started over; books exact, the next step after at most {longest:.1f} s",
        True,
    )


ROWS = (Row(29, "everything killed at once, then resumed", "once", "20, books exact", run),)

if __name__ == "__main__":
    found = cut(int(sys.argv[1]))
    print(found.reached, found.detail, sep="\n")
    sys.exit(not found.passed)
