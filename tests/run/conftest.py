"""Real runs for the tests: the command line, real processes, the shipped model.

A run costs some twenty seconds, so the tests share a few.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import DecisionRecord, EventRecord
from laminar.events.base import Command, Event
from laminar.events.codec import decode_command, decode_event
from laminar.run.secret import read_secret
from laminar.weights.arena.arena import SHARED_MEMORY, arena_path

ROOT = Path(__file__).parents[2]
WORDS = "configs/recipes/words/run.toml"
SMALL = [
    "trainer.total_training_steps=6",
    "trainer.test_freq=3",
    "data.train_batch_size=4",
    "data.val_size=32",
    "data.dataset_size=2000",
    "trainer.save_freq=2",
]


@dataclass
class Finished:
    """A run that has ended."""

    directory: Path
    code: int
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "laminar.cli.main", *arguments]


def laminar(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line and return what it printed; only the test's own limit ends a hang."""
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def train(directory: Path, *arguments: str, config: str = WORDS) -> Finished:
    """One whole run below `directory`."""
    place = f"run.output_dir={directory}", "run.name=run"
    done = laminar("train", "-c", config, *arguments, *place)
    return Finished(directory / "run", done.returncode, done.stdout + done.stderr)


@contextmanager
def begun(run: Path, arguments: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has trained a step, or has ended; what is left of its command is killed."""
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            while not (run / "trainer_book.jsonl").exists() and process.poll() is None:
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def history(run: Path) -> Iterator[Event | Command]:
    """Events and commands of a run, in the order of the log."""
    for _, record in read_log(RealDisk(run / "events")):
        if isinstance(record, EventRecord):
            yield decode_event(record.event)
        elif isinstance(record, DecisionRecord):
            yield decode_command(record.command)


def check_books(run: Finished) -> None:
    """The log replays to the same decisions, and what was issued is accounted for."""
    for check in (("log", "replay"), ("audit",)):
        done = laminar(*check, str(run.directory))
        assert done.returncode == 0, done.stdout + done.stderr


def arenas(run: Path, machines: int = 1) -> list[Path]:
    """The shared memory that there is of a run."""
    names = [
        arena_path(run.name, read_secret(run).run_id, f"node-{index}", "").name
        for index in range(machines)
    ]
    return [path for name in names for path in SHARED_MEMORY.glob(f"{name[:-16]}*")]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A small run of the quickstart's configuration, one for all workers: it is only read."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    made = common / "finished.json"
    with (common / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            run = train(tmp_path_factory.mktemp("finished"), *SMALL)
            assert run.code == 0, run.output
            made.write_text(json.dumps([str(run.directory), run.output]))
    directory, output = json.loads(made.read_text())
    return Finished(Path(directory), 0, output)


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    return laminar


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets a disk fail or hang: failing_disk.c."""
    built = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built
