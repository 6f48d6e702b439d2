"""What `laminar train` finds before it starts a process, and `--dry-run` without starting one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from laminar import exit_codes
from laminar.cli import preflight, train
from laminar.cli.commands import run
from laminar.cli.preflight import check
from laminar.config import Config, ConfigError, load

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart names its model from there."""
    monkeypatch.chdir(ROOT)


def config(tmp_path: Path, *overrides: str) -> Config:
    return load([QUICKSTART], [f"run.output_dir={tmp_path / 'runs'}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.device=cuda"], ["trainer.device", "'cuda'", "no CUDA"]),
        (["rollout.device=cuda"], ["rollout.device", "'cuda'", "no CUDA"]),
        (["coordinator.host=0.0.0.0"], ["0.0.0.0", "127.0.0.1"]),
        (["coordinator.host=10.1.2.3", "coordinator.port=1234"], ["10.1.2.3", "127.0.0.1"]),
    ],
)
def test_a_run_that_this_machine_cannot_have(
    overrides: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        check(config(tmp_path, *overrides))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_cuda_that_is_there_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    preflight.check_devices(config(tmp_path, "trainer.device=cuda", "rollout.device=cuda"))


def test_a_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"runs/quickstart cannot be made.*runs is not a dir"):
        check(config(tmp_path))


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the answer is made up."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be made.*{tmp_path} cannot be written"):
        check(config(tmp_path))


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_run_directory_that_is_taken(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is checked that takes long, nothing is started, and a dangling link is in the way."""
    monkeypatch.setattr(train, "check", lambda config: pytest.fail("it was refused too late"))
    (tmp_path / "quickstart").symlink_to(tmp_path / "nowhere")
    words = ["train", "-c", QUICKSTART, *options, f"run.output_dir={tmp_path}"]
    assert run(words) == exit_codes.USER_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "quickstart exists" in said and "--move-old" in said
