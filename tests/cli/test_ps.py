"""laminar ps and laminar tail: what they show of a run to any machine that sees its directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.cli import commands, tail
from laminar.cluster.slurm import Jobs, write_jobs
from laminar.config import dump_config, load_config
from laminar.names import exit_codes
from laminar.observe.logs import create_attempt
from laminar.run.directory import CONFIG_FILE, LOGS_DIR, SLURM_DIR, STATUS_FILE
from laminar.run.lock import RunLock

STATUS = {
    "phase": "running",
    "step": 3,
    "total_steps": 6,
    "tokens_per_s": 123.4,
    "failure": "",
    "trainer": "waiting",
    "replicas": {
        "rollout-0": {"doing": "pulling", "version": 2, "running": 4, "waiting": 1},
        "rollout-10": {"doing": "", "version": 3, "running": 0, "waiting": 0},
        "rollout-9": {"doing": "", "version": 3, "running": 0, "waiting": 0},
    },
    "hosts": {"agent-0": {"sessions": 9, "sampled": 4}},
    "awaited": ["rollout-0"],
    "silent_nodes": [],
    "processes": {"rollout-0": 1, "rollout-10": 2, "rollout-9": 2, "trainer-0": 3},
}
SQUEUE = """#!/bin/sh
echo '7|7|7|RUNNING|n1|None'
echo '8_2|9|8|RUNNING|n2|None'
echo '8_[3-5%2]|8|8|PENDING||JobArrayTaskLimit'
echo '70|70|70|RUNNING|n3|None'
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / CONFIG_FILE).write_text(
        dump_config(load_config([], ["model.name=m", "data.dataset=gcd"]))
    )
    (run / STATUS_FILE).write_text(json.dumps(STATUS))
    create_attempt(run)
    return run


@pytest.fixture
def lock(run_dir: Path) -> Iterator[RunLock]:
    """A share of a process that lives: the coordinator, which is this process."""
    made = RunLock.join(run_dir, "coordinator")
    yield made
    made.close()


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    assert commands.run_command([str(word) for word in words]) == exit_codes.COMPLETE
    return capsys.readouterr().out.splitlines()


def test_processes_are_shown_with_what_they_do_and_where(
    run_dir: Path, lock: RunLock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that live, and those of which only the coordinator speaks, in the order of numbers."""
    head, _, *rows = shown(capsys, "ps", run_dir)
    assert head == f"{run_dir}: running, step 3/6, 123 tokens/s"
    assert [row.split()[0] for row in rows] == [
        "coordinator",
        "trainer-0",
        "rollout-0",
        "rollout-9",
        "rollout-10",
    ]
    assert rows[0].split()[1:] == [os.uname().nodename, str(os.getpid())]
    assert rows[1].endswith("waiting")
    assert rows[2].endswith("lost, restart pending")
    assert rows[3].endswith("version 3, 0 running, 0 waiting")
    assert rows[4].endswith("version 3, 0 running, 0 waiting")


def test_a_run_without_a_process_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / STATUS_FILE).write_text(
        json.dumps(STATUS | {"phase": "ended", "failure": "the disk is full"})
    )
    assert shown(capsys, "ps", run_dir) == [
        f"{run_dir}: no live process; ended, step 3/6",
        "because: the disk is full",
    ]
    (run_dir / STATUS_FILE).unlink()
    assert "not started" in shown(capsys, "ps", run_dir)[0]


def test_runs_that_live_are_listed(
    run_dir: Path, lock: RunLock, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir.parent / "over").mkdir()
    (run_dir.parent / "over" / CONFIG_FILE).touch()
    _, row = shown(capsys, "ps", run_dir.parent)
    assert row.split() == [str(run_dir), "running", "3/6", "123", os.uname().nodename]
    assert commands.run_command(["ps", str(run_dir.parent / "none")]) == exit_codes.USER_ERROR


def test_jobs_of_the_run_are_shown_with_what_they_wait_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this run and of no other user's or run's; a job that has ended is not in the queue."""
    programs = run_dir.parent / "bin"
    programs.mkdir()
    (programs / "squeue").write_text(SQUEUE)
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (run_dir / SLURM_DIR).mkdir()
    write_jobs(run_dir, Jobs(service="7", rollouts=["8"]))
    _, head, *rows = shown(capsys, "ps", run_dir)
    assert head.split() == ["JOB", "STATE", "ON", "BECAUSE"]
    assert [row.split() for row in rows] == [
        ["7", "RUNNING", "n1"],
        ["8_2", "RUNNING", "n2"],
        ["8_[3-5%2]", "PENDING", "JobArrayTaskLimit"],
    ]
    assert "8_[3-5%2]" in shown(capsys, "ps", run_dir.parent)[1]


def said(second: float, event: str, **fields: object) -> str:
    stamp = f"2026-01-01T00:00:{second:09.6f}Z"
    return json.dumps({"timestamp": stamp, "level": "info", "event": event, **fields}) + "\n"


@pytest.fixture
def logs(run_dir: Path) -> Path:
    directory = run_dir / LOGS_DIR / "latest"
    (directory / "store-0.jsonl").write_text(said(1, "one") + said(3, "three", level="warning"))
    (directory / "rollout-0.jsonl").write_text(said(2, "two", process="x", tokens=7) + '{"cut')
    return directory


def test_lines_of_all_processes_are_merged_by_time(
    run_dir: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is not whole yet is waited for; a file without times counts as just written."""
    (run_dir / LOGS_DIR / SLURM_DIR).mkdir()
    (run_dir / LOGS_DIR / SLURM_DIR / "service-7.log").write_text("module not found\n")
    (logs / "rollout-0.reward.log").write_text("printed\n")
    lines = [line.split() for line in shown(capsys, "tail", run_dir)]
    assert [line[:3] for line in lines[:3]] == [
        ["00:00:01.000", "store-0", "one"],
        ["00:00:02.000", "rollout-0", "two"],
        ["00:00:03.000", "store-0", "WARNING"],
    ]
    assert lines[1][3:] == ["tokens=7"]
    assert sorted(line[1] for line in lines[3:]) == ["rollout-0", "service-7"]
    assert len(shown(capsys, "tail", run_dir, "-n", 2)) == 2
    only = shown(capsys, "tail", run_dir, "service-*", "store-0")
    assert [line.split()[1] for line in only] == ["store-0", "store-0", "service-7"]
    assert commands.run_command(["tail", str(run_dir), "nobody"]) == exit_codes.USER_ERROR
    assert "there are rollout-0, service-7, store-0" in capsys.readouterr().err


def test_following_misses_no_line(run_dir: Path, logs: Path) -> None:
    """What is set aside when it is large, what begins later, and what a later attempt writes."""
    following = tail.RunLogs(run_dir, [])
    assert len(list(following.read_lines())) == 3

    def come() -> list[str]:
        return [line.text.split(maxsplit=2)[2] for line in sorted(following.read_lines())]

    store = logs / "store-0.jsonl"
    with store.open("a") as file:
        file.write(said(4, "four"))
    store.rename(logs / "store-0.jsonl.1")
    assert come() == ["four"]
    store.write_text(said(5, "five"))
    (logs / "trainer-0.jsonl").write_text(said(6, "six"))
    assert come() == ["five", "six"]
    later = create_attempt(run_dir)
    (later / "store-0.jsonl").write_text(said(7, "seven"))
    with store.open("a") as file:
        file.write(said(8, "eight"))
    assert come() == ["seven", "eight"]
    assert come() == []


@pytest.mark.process
def test_ctrl_c_ends_the_following(run_dir: Path, logs: Path) -> None:
    command = [sys.executable, "-m", "laminar.cli.main", "tail", "-f", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[1] for _ in range(3)] == [
            "store-0",
            "rollout-0",
            "store-0",
        ]
        with (logs / "store-0.jsonl").open("a") as file:
            file.write(said(4, "four"))
        assert "four" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == exit_codes.COMPLETE
