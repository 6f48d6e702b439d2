"""A run whose daemons the user starts: `laminar train --prepare` says how."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar import exit_codes
from tests.run.conftest import ROOT, laminar

pytestmark = pytest.mark.process
SETTINGS = [
    "rollout.engine=emulated",
    "rollout.replicas=2",
    "data.dataset_size=100",
    "data.val_size=2",
    "data.train_batch_size=4",
    "trainer.total_training_steps=2",
    "emulation.train_s=0.1",
    "emulation.weights_mb=1",
]
DEADLINE_S = 90


def prepare(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = [f"run.output_dir={directory}", "run.name=run"]
    return laminar("train", "--prepare", *words, *SETTINGS, *where)


def test_what_it_says_runs_it(tmp_path: Path) -> None:
    """The printed commands, word for word, each in a process of its own."""
    prepared = prepare(tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    lines = [line.split() for line in prepared.stdout.splitlines() if line.startswith("  laminar-")]
    assert [line[0] for line in lines] == ["laminar-coord", "laminar-node"]
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    daemons = [subprocess.Popen(line, cwd=ROOT, env=env) for line in lines]
    try:
        assert [daemon.wait(DEADLINE_S) for daemon in daemons] == [0, 0]
    finally:
        for daemon in daemons:
            daemon.kill()
    said = laminar("audit", str(tmp_path / "run")).stdout
    assert "books agree" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "exists; give another run.name"),
        (["--dry-run"], "--dry-run writes nothing"),
        (["--resume", "RUN"], "laminar-coord RUN --resume"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run").mkdir()
    words = [str(tmp_path / "run") if word == "RUN" else word for word in words]
    done = prepare(tmp_path, *words)
    assert done.returncode == exit_codes.USER_ERROR and said in done.stderr, done.stderr
    assert not list((tmp_path / "run").iterdir())
