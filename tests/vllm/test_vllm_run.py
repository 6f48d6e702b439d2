"""Runs with vLLM replicas: they learn, their books close, their logs replay; cores are ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from laminar.events import events as ev
from tests.run.conftest import (
    ROOT,
    SMALL,
    Finished,
    check_books,
    command,
    history,
    laminar,
    train,
)

pytestmark = [pytest.mark.vllm, pytest.mark.process]

VLLM = "rollout.engine=vllm"


@pytest.mark.vllm_ci
def test_a_short_run_trains_and_replays(tmp_path: Path) -> None:
    run = train(tmp_path, VLLM, *SMALL)
    assert run.code == 0, run.output
    check_books(run)
    loaded = [e for e in history(run.directory) if isinstance(e, ev.WeightsLoaded)]
    assert len({e.version for e in loaded}) >= 3
    assert max(e.probe_diff for e in loaded) < 1e-3
    used = [line.get("rollout/kv_used_share/max", 0) for line in run.metrics()]
    assert 0 < max(used) < 1
    assert max(line.get("rollout/running/mean", 0) for line in run.metrics()) > 0
    engines = [r["engine"] for r in _status(run.directory)["replicas"].values()]
    assert len(engines) == 2
    for engine in engines:
        assert engine["prefix_cache_queries"] > 0
        assert engine["kv_capacity_tokens"] > 1_000


@pytest.mark.long
def test_the_quickstart_learns_with_vllm_replicas(tmp_path: Path) -> None:
    run = train(tmp_path, VLLM, "trainer.total_training_steps=40")
    assert run.code == 0, run.output
    check_books(run)
    summary = run.summary
    assert summary["eval_last"] > summary["eval_first"] + 0.2
    loaded = [e for e in history(run.directory) if isinstance(e, ev.WeightsLoaded)]
    assert len({e.version for e in loaded}) >= 10
    assert max(e.probe_diff for e in loaded) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "steps", "told"),
    [
        (signal.SIGKILL, 12, "engine core has died, killed by SIGKILL"),
        (signal.SIGSTOP, 40, "has ended no step for|has not answered"),
    ],
    ids=["killed", "stopped"],
)
def test_a_core_that_is_lost_costs_its_replica_a_restart_and_no_work(
    sent: signal.Signals, steps: int, told: str, tmp_path: Path
) -> None:
    """Dead, or alive and standing still: its trajectories go on elsewhere, and the books close."""
    arguments = [
        VLLM,
        f"trainer.total_training_steps={steps}",
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
    cores: list[int] = []
    threading.Thread(target=lambda: cores.append(_signal_a_core(tmp_path / "run", sent))).start()
    output, _ = process.communicate(timeout=400)
    run = Finished(tmp_path / "run", process.returncode, output)
    assert run.code == 0, output
    assert cores and not psutil.pid_exists(cores[0])
    check_books(run)
    events = list(history(run.directory))
    failed = [e.reason for e in events if isinstance(e, ev.ActorFailed)]
    assert any(re.search(told, reason) for reason in failed), failed
    assert run.summary["tokens_restarted"] == 0


def _signal_a_core(run: Path, sent: signal.Signals) -> int:
    """To the engine core of rollout-0, once steps are being made: the child that was forked."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    replica = psutil.Process(_status(run)["processes"]["rollout-0"])
    core = next(c for c in replica.children() if c.cmdline() == replica.cmdline())
    core.send_signal(sent)
    return core.pid


def _status(run: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((run / "status.json").read_text())
    return status


@pytest.mark.parametrize("dry", [True, False])
def test_a_mistake_is_one_sentence_and_code_2(tmp_path: Path, dry: bool) -> None:
    """A dry run finds it as well as the replica that would start."""
    options = ["--dry-run"] if dry else []
    mistake = "rollout.vllm.extra={max_log_len=1}"
    where = f"run.output_dir={tmp_path}"
    done = laminar("train", "-c", "configs/quickstart.toml", *options, where, VLLM, mistake)
    assert done.returncode == 2, done.stdout + done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "max_log_len" in line]
    assert said and "is not an argument of vLLM" in said[-1]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_dry_run_takes_what_vllm_takes(tmp_path: Path) -> None:
    where = f"run.output_dir={tmp_path}"
    done = laminar("train", "-c", "configs/quickstart.toml", "--dry-run", where, VLLM)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "vllm engine" in done.stdout
