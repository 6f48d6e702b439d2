"""Hints name the command as it can be typed where their reader is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.run import command_line


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python with its `laminar` in the working directory, and nothing of it on PATH."""
    made = tmp_path / "env" / "bin"
    made.mkdir(parents=True)
    (made / "laminar").write_text("#!/bin/sh\n")
    (made / "laminar").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(made / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    command_line._find_program.cache_clear()
    return made


def test_it_is_named_by_its_path_when_it_is_not_on_path(
    bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_line.shell_command("audit", "runs/a b") == "env/bin/laminar audit 'runs/a b'"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    command_line._find_program.cache_clear()
    assert command_line.shell_command("train") == f"{bin_dir}/laminar train"


def test_on_path_it_is_its_name(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(bin_dir))
    assert command_line.shell_command("stop", "runs/x", "--now") == "laminar stop runs/x --now"


def test_another_one_on_path_is_not_this_one(
    bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "laminar").write_text("#!/bin/sh\n")
    (other / "laminar").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    assert command_line.shell_command("clean") == "env/bin/laminar clean"


def test_a_source_tree_that_is_not_installed(bin_dir: Path) -> None:
    (bin_dir / "laminar").unlink()
    words = command_line.shell_command("clean").split()
    assert words == [sys.executable, "-m", "laminar.cli.main", "clean"]


def test_what_is_said_can_be_typed() -> None:
    command_line._find_program.cache_clear()
    words = shlex.split(command_line.shell_command("--version"))
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("laminar 0.")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("laminar 0.")


ROOT = Path(__file__).parents[1]


def test_no_text_installs_the_package_of_that_name_of_somebody_else() -> None:
    """`laminar` of PyPI is another project; the distribution here is laminar-rl."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "laminar-rl"
    files = [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    files += [*(ROOT / "docs").glob("*.md"), *(ROOT / "laminar").rglob("*.py")]
    wrong = re.compile(r"\blaminar\[(vllm|wandb|dev)|pip install [\"']?laminar[\"'\s]")
    assert [file.name for file in files if wrong.search(file.read_text())] == []
