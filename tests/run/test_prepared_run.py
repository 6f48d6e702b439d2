"""A run whose daemons the user starts: `--prepare` of `laminar train` and `fork` says how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from laminar.cli import commands
from laminar.names import exit_codes
from laminar.run.directory import EVENTS_DIR, SECRET_FILE
from tests.run.conftest import ROOT, laminar
from tests.run.test_interruptions import status, until

pytestmark = pytest.mark.process
SETTINGS = [
    "rollout.engine=emulated",
    "rollout.replicas=2",
    "data.dataset_size=100",
    "data.val_size=2",
    "data.train_batch_size=4",
    "trainer.save_freq=1",
    "emulation.train_s=0.1",
    "emulation.weights_mb=1",
]
DEADLINE_S = 90
STALL_S = 5


def prepare(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = [f"run.output_dir={directory}", "run.name=run"]
    return laminar("train", "--prepare", *words, *SETTINGS, *where)


@contextmanager
def started(
    prepared: subprocess.CompletedProcess[str], said: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The printed commands, word for word, each in a process of its own, which prints to a file."""
    assert prepared.returncode == 0, prepared.stderr
    lines = [line.split() for line in prepared.stdout.splitlines() if line.startswith("  laminar-")]
    assert [line[0] for line in lines] == ["laminar-coord", "laminar-node"]
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    daemons = []
    for line in lines:
        with said.with_suffix(f".{line[0].removeprefix('laminar-')}").open("wb") as output:
            daemons.append(subprocess.Popen(line, cwd=ROOT, env=env, stderr=output))
    try:
        yield daemons
    finally:
        for daemon in daemons:
            daemon.kill()


def run_it(
    prepared: subprocess.CompletedProcess[str], said: Path, act: Callable[[], object] = int
) -> None:
    """`act` ends the run, unless it ends by itself."""
    with started(prepared, said) as daemons:
        act()
        assert [daemon.wait(DEADLINE_S) for daemon in daemons] == [0, 0]


@pytest.mark.long
def test_what_it_says_runs_it_and_a_fork_of_it(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_it(prepare(tmp_path, "trainer.total_training_steps=1"), tmp_path / "run")
    to = ["--at-step", "1", "trainer.total_training_steps=2", "run.name=fork"]
    run_it(laminar("fork", run, "--prepare", *to), tmp_path / "fork")
    for name in ("run", "fork"):
        assert "books agree" in laminar("audit", str(tmp_path / name)).stdout


def test_a_node_leaves_a_coordinator_that_stands_still_and_the_run_continues_later(
    tmp_path: Path,
) -> None:
    """Nobody supervises daemons that were started by hand."""
    limit = f"coordinator.stall_timeout_s={STALL_S}"
    prepared = prepare(tmp_path, "trainer.total_training_steps=10000", limit)
    with started(prepared, tmp_path / "first") as (coordinator, node):
        until(lambda: status(tmp_path)["step"] >= 2, "two steps were trained")
        coordinator.send_signal(signal.SIGSTOP)
        assert node.wait(DEADLINE_S) == exit_codes.COORDINATOR_ABSENT
        said = (tmp_path / "first.node").read_text()
        assert "the coordinator lives, but has answered nothing for" in said
        assert f"start laminar-coord {tmp_path / 'run'} again" in said
        coordinator.kill()
    step = status(tmp_path)["step"]
    with started(prepared, tmp_path / "second") as (coordinator, node):
        until(lambda: status(tmp_path)["step"] >= step + 2, "it trains again")
        coordinator.send_signal(signal.SIGTERM)
        assert [coordinator.wait(DEADLINE_S), node.wait(DEADLINE_S)] == [0, 0]
    assert "books agree" in laminar("audit", str(tmp_path / "run")).stdout


def test_another_machine_that_sees_the_directory_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gracefully, with the run's secret; a directory that has another secret is told so."""
    run = tmp_path / "run"

    def stop() -> None:
        until(lambda: status(tmp_path)["step"] >= 1, "a step was trained")
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        secret = (run / SECRET_FILE).read_bytes()
        (run / SECRET_FILE).write_bytes(bytes(len(secret)))
        assert commands.run_command(["stop", str(run)]) == exit_codes.USER_ERROR
        assert "secret" in capsys.readouterr().err
        (run / SECRET_FILE).write_bytes(secret)
        assert commands.run_command(["stop", str(run)]) == exit_codes.COMPLETE

    run_it(prepare(tmp_path, "trainer.total_training_steps=10000"), tmp_path / "said", stop)
    said = capsys.readouterr().out
    assert "asked coordinator (pid" in said and f"{run} has stopped (ended" in said
    logged = (segment.read_bytes() for segment in (run / EVENTS_DIR).iterdir())
    assert any(b"laminar stop on elsewhere" in content for content in logged)
    assert "books agree" in laminar("audit", str(run)).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "exists; give another run.name"),
        (["--dry-run"], "not allowed with argument"),
        (["--resume", "RUN"], "laminar-coord RUN --resume"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run").mkdir()
    words = [str(tmp_path / "run") if word == "RUN" else word for word in words]
    done = prepare(tmp_path, *words)
    assert done.returncode == exit_codes.USER_ERROR and said in done.stderr, done.stderr
    assert not list((tmp_path / "run").iterdir())
