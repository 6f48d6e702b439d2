"""Runs with vLLM replicas: they learn, their books close, their logs replay; cores are ended."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import PullPurpose
from tests.run.conftest import ROOT, SMALL, Finished, check_books, command, history, laminar, train

pytestmark = [pytest.mark.vllm, pytest.mark.process]

VLLM = "rollout.engine=vllm"


@pytest.mark.parametrize(
    "in_flight",
    [
        pytest.param("", marks=pytest.mark.vllm_ci),
        pytest.param("keep", marks=pytest.mark.long),
        pytest.param("recompute", marks=pytest.mark.long),
    ],
)
def test_a_short_run_trains_and_replays(tmp_path: Path, in_flight: str) -> None:
    flying = (
        "rollout.weight_update=in-flight",
        "rollout.groups_per_version=0",
        f"rollout.kv_on_update={in_flight}",
    )
    run = train(tmp_path, VLLM, *SMALL, *(flying if in_flight else ()))
    assert run.code == 0, run.output
    check_books(run)
    pulls = {c.purpose for c in history(run.directory) if isinstance(c, cmd.PullWeights)}
    assert (PullPurpose.IN_FLIGHT in pulls) == bool(in_flight)
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
    ("sent", "told"),
    [
        (signal.SIGKILL, "engine core has died, killed by SIGKILL"),
        (signal.SIGSTOP, "has finished no step for|did not answer"),
    ],
    ids=["killed", "stopped"],
)
def test_a_core_that_is_lost_costs_its_replica_a_restart_and_no_work(
    sent: signal.Signals, told: str, tmp_path: Path
) -> None:
    """Dead, or alive and standing still: its trajectories go on elsewhere, and the books close.
    The run is stopped when it has said so, however quick it is."""
    arguments = [
        VLLM,
        "trainer.total_training_steps=100000",
        "data.val_size=32",
        f"run.output_dir={tmp_path}",
        "run.name=run",
    ]
    process = subprocess.Popen(
        command("train", "-c", "configs/recipes/words/run.toml", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    cores: list[int] = []

    def lose_a_core() -> None:
        try:
            cores.append(_signal_a_core(tmp_path / "run", sent))
            _wait(lambda: any(re.search(told, reason) for reason in _failures(tmp_path / "run")))
        finally:
            laminar("stop", str(tmp_path / "run"))

    threading.Thread(target=lose_a_core).start()
    output, _ = process.communicate(timeout=400)
    run = Finished(tmp_path / "run", process.returncode, output)
    assert run.code == 0, output
    assert cores and not psutil.pid_exists(cores[0])
    check_books(run)
    failed = _failures(run.directory)
    assert any(re.search(told, reason) for reason in failed), failed
    assert run.summary["tokens_restarted"] == 0


def _signal_a_core(run: Path, sent: signal.Signals) -> int:
    """To the engine core of rollout-0, once steps are being made: the child that was forked."""
    metrics = run / "metrics.jsonl"
    _wait(lambda: metrics.exists() and bool(metrics.read_text()))
    replica = psutil.Process(_status(run)["processes"]["rollout-0"])
    core = next(c for c in replica.children() if c.cmdline() == replica.cmdline())
    core.send_signal(sent)
    return core.pid


def _failures(run: Path) -> list[str]:
    return [e.reason for e in history(run) if isinstance(e, ev.ActorFailed)]


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not until() and time.monotonic() < deadline:
        time.sleep(0.2)


def _status(run: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((run / "status.json").read_text())
    return status


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("{max_log_len=1}", "rollout.vllm.extra.max_log_len is not an argument of vLLM"),
        ("{quantization='cubes'}", "vLLM refuses rollout.vllm.extra.quantization = 'cubes': "),
    ],
)
def test_a_mistake_in_extra_is_one_sentence_and_code_2(
    extra: str, told: str, tmp_path: Path
) -> None:
    """It leaves no run directory, so that the corrected command is not refused for it."""
    where, mistake = f"run.output_dir={tmp_path}", f"rollout.vllm.extra={extra}"
    done = laminar("train", "-c", "configs/recipes/words/run.toml", where, VLLM, mistake)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and told in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_fails_at_each_start_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    """vLLM takes this model's config, and its attention on CPU does not know heads of 20: the
    engine's own words are the run's, on a terminal without tracebacks and in the directory."""
    model = tmp_path / "model"
    _odd_heads(model)
    run = train(tmp_path, VLLM, f"model.name={model}")
    told = "head_dim=20"
    assert run.code == 1, run.output
    failure = run.summary["failure"]
    assert "failed the same way at two starts" in failure and told in failure
    assert told in json.dumps(run.summary["lost_by"]) and told in json.dumps(_status(run.directory))
    assert told in run.output and "Traceback" not in run.output and "Triton" not in run.output
    assert run.output.count("\n") < 80, run.output
    logs = [path.read_text() for path in run.directory.glob("logs/latest/*.engine.log")]
    assert len(logs) == 2 and all("Traceback" in text for text in logs)
    failed = [e for e in history(run.directory) if isinstance(e, ev.ActorFailed)]
    assert all(e.engine for e in failed) and len(failed) <= 4


def _odd_heads(directory: Path) -> None:
    """A random Qwen2 with heads of 20 numbers, and the shipped model's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    base = ROOT / "configs" / "models" / "spell-0.6m"
    shutil.copytree(base, directory)
    shipped = json.loads((base / "config.json").read_text())
    kept = {key: shipped[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 80, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**kept, **sizes, **heads, tie_word_embeddings=True, bos_token_id=None)
    Qwen2ForCausalLM(config).save_pretrained(directory)


def test_a_dry_run_takes_what_vllm_takes(tmp_path: Path) -> None:
    where = f"run.output_dir={tmp_path}"
    done = laminar("train", "-c", "configs/recipes/words/run.toml", "--dry-run", where, VLLM)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "vllm engine" in done.stdout
