"""A run whose daemons the user starts: `--prepare` of `laminar train` and `fork` says how."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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


def prepare(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = [f"run.output_dir={directory}", "run.name=run"]
    return laminar("train", "--prepare", *words, *SETTINGS, *where)


def run_it(prepared: subprocess.CompletedProcess[str], act: Callable[[], object] = int) -> None:
    """The printed commands, word for word, each in a process of its own; `act` ends the run, unless
    it ends by itself."""
    assert prepared.returncode == 0, prepared.stderr
    lines = [line.split() for line in prepared.stdout.splitlines() if line.startswith("  laminar-")]
    assert [line[0] for line in lines] == ["laminar-coord", "laminar-node"]
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    daemons = [subprocess.Popen(line, cwd=ROOT, env=env) for line in lines]
    try:
        act()
        assert [daemon.wait(DEADLINE_S) for daemon in daemons] == [0, 0]
    finally:
        for daemon in daemons:
            daemon.kill()


@pytest.mark.long
def test_what_it_says_runs_it_and_a_fork_of_it(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_it(prepare(tmp_path, "trainer.total_training_steps=1"))
    to = ["--at-step", "1", "trainer.total_training_steps=2", "run.name=fork"]
    run_it(laminar("fork", run, "--prepare", *to))
    for name in ("run", "fork"):
        assert "books agree" in laminar("audit", str(tmp_path / name)).stdout


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

    run_it(prepare(tmp_path, "trainer.total_training_steps=10000"), act=stop)
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
