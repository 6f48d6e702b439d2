"""A run that pauses and goes on: real processes, no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.run.lock import holders
from tests.run.conftest import ROOT, Finished, arenas, check_books, command, history, laminar
from tests.run.test_interruptions import end, status, until

pytestmark = pytest.mark.process
STEPS = 9
WORDS = [
    "rollout.engine=emulated",
    "rollout.replicas=2",
    "rollout.group_size=4",
    "rollout.max_num_seqs=16",
    "rollout.progress_interval_ms=100",
    "data.dataset_size=300",
    "data.val_size=8",
    "data.max_prompt_length=32",
    "data.max_response_length=400",
    "data.train_batch_size=4",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=100",
    "emulation.median_response=60",
    "emulation.train_s=0.5",
    "emulation.weights_mb=2",
    "run.name=run",
]


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", *words),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def paused(process: subprocess.Popen[str], directory: Path) -> Finished:
    """It has ended as one that goes on, and nothing of it is left but its directory."""
    run = end(process, directory)
    assert run.code == exit_codes.PAUSED, run.output
    assert "the run is paused" in run.output
    assert f"train --resume {run.directory}" in run.output
    assert holders(run.directory) == [] and arenas(run.directory) == []
    assert status(directory)["pause"] == "paused"
    return run


@pytest.mark.long
def test_two_pauses_cost_no_step_and_one_report_has_all(tmp_path: Path) -> None:
    """By the command, and by the SIGTERM with which a batch system announces its time limit."""
    run_dir = tmp_path / "run"
    process = start(*WORDS, f"run.output_dir={tmp_path}")
    until(lambda: status(tmp_path)["step"] >= 2, "step 2")
    done = laminar("stop", str(run_dir), "--pause")
    assert done.returncode == 0 and "has stopped (paused, " in done.stdout, done
    first = paused(process, tmp_path)
    audit = laminar("audit", str(run_dir))
    assert audit.returncode == 0 and "the run is paused" in audit.stdout, audit
    assert "paused" in laminar("report", str(run_dir)).stdout
    process = start("--resume", str(run_dir), SLURM_JOB_ID="7")
    until(lambda: status(tmp_path)["step"] >= first.summary["steps"] + 2, "two more steps")
    process.send_signal(signal.SIGTERM)
    paused(process, tmp_path)
    run = end(start("--resume", str(run_dir)), tmp_path)
    assert run.code == 0, run.output
    check_books(run)
    assert run.summary["steps"] == STEPS and not run.summary["paused"]
    steps = [line["step"] for line in run.metrics() if "reward/mean" in line]
    assert steps == [*range(1, STEPS + 1)]
    events = list(history(run_dir))
    assert not [e for e in events if isinstance(e, cmd.RepeatStep)]
    assert len([e for e in events if isinstance(e, ev.RunResumed)]) == 2
    assert json.loads((run_dir / "status.json").read_text())["pause"] == ""
