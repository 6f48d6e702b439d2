"""A run whose processes are all killed at once, twice, is taken up again each time and comes to its
end: the books agree, and the weights are those of one that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from laminar.events import events as ev
from laminar.run_lock import holders
from tests.run.conftest import ROOT, Finished, check_books, command, history, laminar

pytestmark = [pytest.mark.process, pytest.mark.long]
WAIT_S = 120
SMALL = (
    "trainer.total_training_steps=8",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=2000",
)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_at_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """All processes of the run at once, as a power cut does."""
    deadline = time.monotonic() + WAIT_S
    while _status(run).get("step", -1) < step or not _generates(run):
        assert process.poll() is None and time.monotonic() < deadline, f"never came to step {step}"
        time.sleep(0.05)
    for holder in holders(run):
        os.kill(holder.pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    while holders(run):
        time.sleep(0.05)


def _status(run: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((run / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _generates(run: Path) -> bool:
    return any(replica["running"] for replica in _status(run).get("replicas", {}).values())


def test_all_processes_are_killed_twice(tmp_path: Path) -> None:
    """The second time it goes on with another number of steps and one replica more."""
    run = tmp_path / "run"
    place = (f"run.output_dir={tmp_path}", "run.name=run")
    first = start("-c", "configs/quickstart.toml", *SMALL, *place)
    kill_at_step(first, run, 2)
    kill_at_step(start("--resume", str(run)), run, 4)
    more = ("trainer.total_training_steps=9", "rollout.replicas=3")
    last = start("--resume", str(run), *more)
    output, _ = last.communicate(timeout=WAIT_S)
    finished = Finished(run, last.returncode, output)
    assert finished.code == 0, output
    log = list(history(run))
    assert [item.total_steps for item in log if isinstance(item, ev.RunResumed)] == [8, 9]
    trained = [item.step_index for item in log if isinstance(item, ev.StepCompleted)]
    assert trained == list(range(9))
    assert "rollout-2" in finished.summary["processes"]
    check_books(finished)
    again = laminar("retrain", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
