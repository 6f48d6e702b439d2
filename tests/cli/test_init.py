"""`laminar init` writes a run that starts, and `laminar quickstart` is the shipped one anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.cli import init
from laminar.cli.commands import run_command
from laminar.cli.init import build_files
from laminar.names import exit_codes

ROOT = Path(__file__).parents[2]


def test_what_it_writes_passes_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "mine"]) == exit_codes.COMPLETE
    assert f"train -c {Path('mine') / 'run.toml'} --dry-run\n" in capsys.readouterr().out
    for where, file in ((tmp_path, "mine/run.toml"), (tmp_path / "mine", "run.toml")):
        monkeypatch.chdir(where)
        assert run_command(["train", "-c", file, "--dry-run"]) == exit_codes.COMPLETE
        shown = capsys.readouterr().out
        assert "8 training prompts, 2 held out" in shown
        assert "'tnahpele': 1\n" in shown and "'': 0\n" in shown
        assert not (where / "runs").exists()


def test_the_name_of_a_directory_may_be_anything(tmp_path: Path) -> None:
    assert 'name = "a \\"b\\" {c}"' in build_files('a "b" {c}')["run.toml"]


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert run_command(["init", str(tmp_path)]) == exit_codes.USER_ERROR
    assert f"{tmp_path / 'reward.py'} exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run_command(["init", str(tmp_path / "file" / "mine")]) == exit_codes.USER_ERROR
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_the_quickstart_runs_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["quickstart", "--dry-run", "--max-steps", "7", "--output-dir=here", "run.name=x"]
    assert run_command(words) == exit_codes.COMPLETE
    shown = capsys.readouterr().out
    assert (
        f"model      {init.QUICKSTART_MODEL.resolve()}" in shown and "steps      7 of 16" in shown
    )
    assert "run        here/x\n" in shown


def test_what_is_shipped_is_what_the_checkout_has() -> None:
    assert init.CONFIGS.resolve() == ROOT / "configs"
    assert init.REFERENCE_CONFIG.is_file() and init.QUICKSTART_MODEL.is_dir()
