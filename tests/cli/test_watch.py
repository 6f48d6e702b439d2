"""laminar watch: a run that goes on elsewhere, one that has ended, and what is no run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli import commands, watch
from laminar.config import dump_config, load_config
from laminar.names import exit_codes
from laminar.run.directory import CONFIG_FILE, STATUS_FILE
from laminar.run.lock import RunLock
from tests.launch.test_panel import STATUS
from tools.kit.run_directory import make_run, world_log


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", world_log())
    settings = ["model.name=m", "data.dataset=gcd"]
    (tmp_path / "run" / CONFIG_FILE).write_text(dump_config(load_config([], settings)))
    return tmp_path / "run"


def says(run_dir: Path, phase: str, step: int) -> None:
    (run_dir / STATUS_FILE).write_text(json.dumps(STATUS | {"phase": phase, "step": step}))


def each_look(monkeypatch: pytest.MonkeyPatch, acts: list[Callable[[], None]]) -> None:
    """What happens in the run before the command looks at it: the first time, the second, ..."""
    look = watch.read_status

    def status(run_dir: Path) -> dict[str, object]:
        if acts:
            acts.pop(0)()
        return look(run_dir)

    monkeypatch.setattr(watch, "read_status", status)


def test_a_run_that_has_ended_shows_its_end(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(run_dir, "ended", 3)
    assert commands.run_command(["watch", str(run_dir)]) == exit_codes.COMPLETE
    out = capsys.readouterr().out
    assert "ended      step 3/6" in out and "3 in " in out.partition("\nsteps ")[2]
    assert not (run_dir / "summary.json").exists(), "who watches writes nothing"


def test_a_live_run_is_shown_until_it_ends(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = RunLock.join(run_dir, "train")
    says(run_dir, "running", 1)
    each_look(monkeypatch, [lambda: None, lambda: None, lambda: says(run_dir, "ended", 3)])
    assert commands.run_command(["watch", str(run_dir)]) == exit_codes.COMPLETE
    lock.close()
    out = capsys.readouterr().out
    assert out.index("running") < out.index("ended") < out.index("\nsteps ")


def test_ctrl_c_leaves_the_run_alone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    lock = RunLock.join(run_dir, "train")
    says(run_dir, "running", 1)
    each_look(monkeypatch, [lambda: None, interrupt])
    assert commands.run_command(["watch", str(run_dir)]) == exit_codes.COMPLETE
    assert lock.find_lost_reason() is None
    lock.close()
    assert "the run continues" in capsys.readouterr().out


def test_a_run_whose_processes_are_gone_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", world_log()[:-3])
    settings = ["model.name=m", "data.dataset=gcd"]
    (tmp_path / "run" / CONFIG_FILE).write_text(dump_config(load_config([], settings)))
    says(tmp_path / "run", "running", 3)
    assert commands.run_command(["watch", str(tmp_path / "run")]) == exit_codes.COMPLETE
    assert "all its processes are gone" in capsys.readouterr().out


def test_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert commands.run_command(["watch", str(path)]) == exit_codes.USER_ERROR
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(path) in said
    assert watch.POLL_S < watch.ALIVE_S
