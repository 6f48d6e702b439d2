"""What a finished run must show: its processes, its figures, its books, its replay."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.analysis.facts.trained_steps import read_trained_steps
from laminar.cli import commands
from laminar.names import exit_codes
from tests.run.conftest import ROOT, Finished, arenas, laminar

Cli = Callable[..., subprocess.CompletedProcess[str]]
PROCESSES = {"coordinator", "node-0", "store-0", "trainer-0", "relay-0", "rollout-0", "rollout-1"}
KEYS = {
    "eval_first",
    "eval_last",
    "weight_versions",
    "staleness_mean",
    "staleness_max",
    "overlap",
    "decode_gap_ratio",
    "publish_stall_share",
    "response_length_p50",
    "response_length_p99",
    "tokens_per_s",
    "trajectories_trained",
    "processes",
    "seconds",
}

pytestmark = pytest.mark.process


def test_the_summary_has_every_figure(finished: Finished) -> None:
    summary = finished.summary
    assert summary.keys() >= KEYS
    assert summary["processes"].keys() >= PROCESSES
    assert len(set(summary["processes"].values())) == len(summary["processes"])
    assert summary["trajectories_trained"] == 6 * 4 * 8
    assert summary["weight_versions"] == 6 + 2  # the base model, six steps, the export
    assert 0 <= summary["eval_first"] <= 1
    assert 0 <= summary["eval_last"] <= 1
    assert summary["staleness_max"] <= 2
    assert summary["response_length_p50"] <= summary["response_length_p99"] <= 128


def test_the_time_of_every_process_is_accounted_for(finished: Finished) -> None:
    shares = finished.summary["time_shares"]
    assert shares.keys() >= {"trainer-0", "rollout-0", "rollout-1"}
    for process, parts in shares.items():
        assert sum(parts.values()) == pytest.approx(1.0, abs=1e-6), process


def test_the_last_lines_say_what_happened(finished: Finished) -> None:
    for words in ("held-out score", "summary.json", "laminar audit", "export"):
        assert words in finished.output


def test_what_the_model_wrote_can_be_read(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the test's own process: `laminar samples` needs no process of the run."""
    monkeypatch.chdir(ROOT)
    assert commands.run_command(["samples", str(finished.directory), "--step", "6", "--jsonl"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(samples) == 4 * 8 and {sample["step"] for sample in samples} == {6}
    for sample in samples:
        assert sample["prompt"].startswith("Spell this word backward")
        assert sample["response"].endswith("<eos>") is not sample["truncated"]
        assert sample["step"] - 1 - sample["version_step"] <= 2
        if f"<answer>{sample['answer']}</answer>" in sample["response"][-40:]:
            assert sample["reward"] == 1.0


def test_the_report_has_every_chart(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert commands.run_command(["report", str(finished.directory)]) == 0
    page = (finished.directory / "report.html").read_text()
    assert "no figures yet" not in page and "Spell this word backward" in page
    assert "outcome             complete" in capsys.readouterr().out


def test_metrics_have_one_line_per_step_with_the_known_names(finished: Finished) -> None:
    steps = [line for line in finished.metrics() if "actor/pg_loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for name in ("reward/mean", "actor/grad_norm", "actor/entropy", "staleness/mean"):
        assert all(name in line for line in steps), name
    assert list((finished.directory / "tensorboard").iterdir())


def test_the_engine_and_the_trainer_agree(finished: Finished) -> None:
    """Mismatch of equal weights: rounding only (stale data is compared with what generated it)."""
    first = next(line for line in finished.metrics() if line["step"] == 1)
    assert first["train_rollout_logprob_abs_diff/max"] < 1e-4


def test_every_process_writes_structured_logs(finished: Finished) -> None:
    logs = finished.directory / "logs" / "latest"
    assert {p.stem for p in logs.glob("*.jsonl")} == PROCESSES
    for file in logs.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            assert {"run", "process", "timestamp", "event"} <= record.keys()
    rollout = (logs / "rollout-0.jsonl").read_text().splitlines()
    started = [r for r in map(json.loads, rollout) if r["event"] == "trajectory-started"]
    assert started
    assert {"event_seq", "trajectory", "version"} <= started[0].keys()


def test_nothing_is_left_in_shared_memory(finished: Finished) -> None:
    """Of this run: others of the same name may be at work."""
    assert arenas(finished.directory) == []


def test_replay_is_identical(finished: Finished, cli: Cli) -> None:
    done = cli("log", "replay", str(finished.directory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout
    assert str(finished.summary["events"]) in done.stdout.replace(",", "")


def test_what_was_trained_is_trained_again_to_the_same_bytes(finished: Finished, cli: Cli) -> None:
    """From nothing but the model, the log and the store; the time is that of the six steps."""
    done = cli("retrain", str(finished.directory))
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("identical: 6 steps repeated, ")


@pytest.mark.long
def test_a_step_that_does_not_come_out_again_is_named(
    finished: Finished, cli: Cli, tmp_path: Path
) -> None:
    """Another answer of the third batch is said to be right."""
    shutil.copytree(finished.directory / "events", tmp_path / "events")
    shutil.copy(finished.directory / "config.toml", tmp_path)
    third = read_trained_steps(finished.directory).steps[2].trajectories
    source = finished.directory / "store.sqlite"
    with sqlite3.connect(source) as store, sqlite3.connect(tmp_path / source.name) as copy:
        store.backup(copy)
        rows = dict(copy.execute("SELECT id, reward_bits FROM trajectories"))
        changed = next(i for i in third if any(rows[i] != rows[other] for other in third))
        other = next(bits for bits in map(rows.__getitem__, third) if bits != rows[changed])
        copy.execute("UPDATE trajectories SET reward_bits = ? WHERE id = ?", (other, changed))
    done = cli("retrain", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == "NOT identical: step 3 of 6, version 3 is the first to differ"


def test_the_books_agree(finished: Finished, cli: Cli) -> None:
    done = cli("audit", str(finished.directory))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("groups", "trajectories", "tokens", "agree"):
        assert words in done.stdout


def test_the_export_is_a_model_that_loads(finished: Finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = finished.directory / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    ids = tokenizer("Spell this word backward (example: sun -> nus): cat\n", return_tensors="pt")
    assert model(**ids).logits.shape[-1] == model.config.vocab_size


def test_a_log_that_has_lost_its_end_is_refused_by_train_and_by_the_daemon(
    finished: Finished, tmp_path: Path
) -> None:
    """Half of it is gone, as on a disk that lost its end: nothing is begun, and nothing written but
    what the daemon logs of itself."""
    run = tmp_path / "run"
    shutil.copytree(finished.directory, run)
    (segment,) = (run / "events").glob("events-*.log")
    os.truncate(segment, segment.stat().st_size // 2)
    before = written(run)
    said = f"the event log {run / 'events'} has lost its end: "
    done = laminar("train", "--resume", str(run))
    assert done.returncode == exit_codes.USER_ERROR and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
    daemon = [sys.executable, "-m", "laminar.cli.coord", str(run)]
    coordinator = subprocess.run(daemon, capture_output=True, text=True)
    assert coordinator.returncode == exit_codes.USER_ERROR and said in coordinator.stderr
    assert written(run) == before


def written(run: Path) -> dict[str, bytes]:
    """By file, but what is said of processes, and the shared memory of SQLite's readers."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    apart = ("logs/", "processes/", "store.sqlite-")
    return {n: p.read_bytes() for n, p in files.items() if not n.startswith(apart)}
