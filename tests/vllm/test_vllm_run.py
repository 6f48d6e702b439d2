"""A whole run with vLLM replicas: it learns, its books close, its log replays."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from laminar.events import events as ev
from tests.run.conftest import ROOT, Finished, check_books, command, history, train

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.process]

QUICKSTART = ["rollout.engine=vllm", "trainer.total_training_steps=40"]


def test_the_quickstart_learns_with_vllm_replicas(tmp_path: Path) -> None:
    run = train(tmp_path, *QUICKSTART)
    assert run.code == 0, run.output
    check_books(run)
    summary = run.summary
    assert summary["eval_last"] > summary["eval_first"] + 0.2
    loaded = [e for e in history(run.directory) if isinstance(e, ev.WeightsLoaded)]
    assert len({e.version for e in loaded}) >= 10
    assert max(e.probe_diff for e in loaded) < 1e-3


def test_a_core_that_is_killed_costs_its_replica_a_restart_and_no_work(tmp_path: Path) -> None:
    """Its trajectories go on elsewhere, and the books close."""
    arguments = [
        "rollout.engine=vllm",
        "trainer.total_training_steps=12",
        "data.val_size=32",
        f"run.output_dir={tmp_path}",
        "run.name=run",
    ]
    process = subprocess.Popen(
        command("train", "-c", "configs/quickstart.toml", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed: list[int] = []
    threading.Thread(target=lambda: killed.append(_kill_a_core(tmp_path / "run"))).start()
    output, _ = process.communicate(timeout=400)
    run = Finished(tmp_path / "run", process.returncode, output)
    assert run.code == 0, output
    assert killed
    check_books(run)
    events = list(history(run.directory))
    failed = [e.reason for e in events if isinstance(e, ev.ActorFailed)]
    assert any("engine core has died" in reason for reason in failed)


def _kill_a_core(run: Path) -> int:
    """The engine core of rollout-0, once steps are being made: the child that was forked."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    status = json.loads((run / "status.json").read_text())
    replica = psutil.Process(status["processes"]["rollout-0"])
    core = next(c for c in replica.children() if c.cmdline() == replica.cmdline())
    core.kill()
    return core.pid
