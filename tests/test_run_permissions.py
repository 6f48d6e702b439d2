"""Permissions of a run directory: new ones are private, and none that others can write is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.cli import coord, node
from laminar.cli.commands import build_parser
from laminar.config import ConfigError, load_config
from laminar.launch.resume_check import resumed_config
from laminar.launch.train import prepare_directory
from laminar.run.permissions import check_private

BASE = ("data.dataset=spell_backward", "model.name=org/model", "reward.scope=trajectory")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """That of a shared group: what a process makes, its group can write."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def prepare(tmp_path: Path, *overrides: str) -> Path:
    config = load_config([], [f"run.output_dir={tmp_path}", *BASE, *overrides])
    prepare_directory(config, config.run_dir, {}).close()
    return config.run_dir


@pytest.mark.parametrize("mode", ["0700", "0750", "0755"])
def test_a_new_run_directory_has_the_mode_of_its_key_and_nothing_others_can_write(
    tmp_path: Path, mode: str
) -> None:
    run = prepare(tmp_path, *([] if mode == "0700" else [f"run.mode={mode}"]))
    assert f"{run.stat().st_mode & 0o7777:04o}" == mode
    check_private(run)
    entries = [run, *run.rglob("*")]
    assert not [path for path in entries if path.lstat().st_mode & 0o022 and not path.is_symlink()]


def test_a_mode_with_which_others_can_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.mode = '0770'.* must be '0700', '0750'"):
        load_config([], [*BASE, "run.mode=0770"])


@pytest.mark.parametrize("name", [".", "config.toml", "checkpoints/step_2/trainer.json"])
def test_a_run_that_others_can_write_is_not_run_by_any_command(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(tmp_path, "run.mode=0755")
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.exists() or path.write_text("{}")
    path.chmod(mode := 0o775 if path.is_dir() else 0o664)
    said = rf"{path} can be written by other users \(mode {mode:04o}\).*chmod -R go-w {run}$"
    with pytest.raises(ConfigError, match=said):
        resumed_config(run, [], [])
    parser = build_parser()
    for words in (["serve"], ["retrain"], ["fork", "--at-step", "2"]):
        arguments = parser.parse_args([words[0], str(run), *words[1:]])
        with pytest.raises(ConfigError, match=said):
            arguments.function(arguments)
    with pytest.raises(ConfigError, match=said):
        node.run_node([str(run), "--name", "node-0"])
    monkeypatch.setattr(sys, "argv", ["laminar-coord", str(run)])
    with pytest.raises(SystemExit, match="2"):
        coord.main()
    run.chmod(0o700)  # none but its owner reaches what is in it
    check_private(run)


def test_a_run_of_another_user_is_forked_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of a group can put a directory in the place of a run's."""
    run = prepare(tmp_path)
    os.chown(run, 1234, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 1)
    owner = run.stat().st_uid
    with pytest.raises(ConfigError, match=f"{run} belongs to user {owner}, who could change"):
        check_private(run)
    check_private(run, foreign=True)
