"""laminar status: a run elsewhere, its waits and the age of its figures, an ended run, no run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli import commands, status
from laminar.config import dump_config, load_config
from laminar.names import exit_codes
from laminar.run.directory import CONFIG_FILE, STATUS_FILE
from laminar.run.lock import RunLock
from tests.launch.test_panel import STATUS
from tools.kit.run_directory import make_run, world_log

WAIT = {
    "waiter": "step 4", "event": "step-completed", "owner": "trainer-0", "what": "a batch",
    "since": 2.0, "until": 62.0, "then": "trainer-0 is restarted", "cause": 7, "key": "",
}  # fmt: skip


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
    look = status.read_status

    def read(run_dir: Path) -> dict[str, object]:
        if acts:
            acts.pop(0)()
        return look(run_dir)

    monkeypatch.setattr(status, "read_status", read)


def test_a_run_that_has_ended_shows_its_end(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(run_dir, "ended", 3)
    assert commands.run_command(["status", "--follow", str(run_dir)]) == exit_codes.COMPLETE
    out = capsys.readouterr().out
    assert "ended      step 3/6" in out and "3 in " in out.partition("\nsteps ")[2]
    assert not (run_dir / "summary.json").exists(), "who watches writes nothing"


def test_a_live_run_is_shown_until_it_ends(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = RunLock.join(run_dir, "train")
    says(run_dir, "running", 1)
    each_look(monkeypatch, [lambda: None, lambda: None, lambda: says(run_dir, "ended", 3)])
    assert commands.run_command(["status", "--follow", str(run_dir)]) == exit_codes.COMPLETE
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
    assert commands.run_command(["status", "--follow", str(run_dir)]) == exit_codes.COMPLETE
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
    assert (
        commands.run_command(["status", "--follow", str(tmp_path / "run")]) == exit_codes.COMPLETE
    )
    assert "all its processes are gone" in capsys.readouterr().out


def shows(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert commands.run_command(["status", *words, str(run_dir)]) == exit_codes.COMPLETE
    return capsys.readouterr().out


def test_waits_are_a_table_with_the_time_left(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {"waits": [WAIT, WAIT | {"until": None, "owner": "relay-0"}], "waits_total": 99}
    (run_dir / STATUS_FILE).write_text(json.dumps(STATUS | waits))
    out = shows(run_dir, capsys)
    first, second = (
        next(li for li in out.splitlines() if o in li) for o in ("trainer-0", "relay-0")
    )
    assert first.split()[:4] == ["step", "4", "step-completed", "trainer-0"]
    assert "10 s" in first and "50 s" in first and "trainer-0 is restarted" in first
    assert " - " in second and "and 97 more" in out
    assert "no process of the run is alive" in out


def test_old_figures_are_marked_unless_the_run_has_ended(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(run_dir, "running", 1)
    assert "OLD" not in shows(run_dir, capsys)
    for phase, marked in (("running", True), ("ended", False)):
        says(run_dir, phase, 1)
        written = (run_dir / STATUS_FILE).stat().st_mtime
        os.utime(run_dir / STATUS_FILE, (written - 40, written - 40))
        assert ("DATA 40 s OLD" in shows(run_dir, capsys)) == marked
        assert json.loads(shows(run_dir, capsys, "--json"))["age_seconds"] >= 40


def test_the_log_has_the_status_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed before its last step, for which the trainer is awaited."""
    log = world_log()
    last = max(i for i, (stamped, _) in enumerate(log) if stamped.peer.startswith("trainer"))
    make_run(tmp_path / "run", log[:last])
    settings = ["model.name=m", "data.dataset=gcd"]
    (tmp_path / "run" / CONFIG_FILE).write_text(dump_config(load_config([], settings)))
    found = json.loads(shows(tmp_path / "run", capsys, "--json"))
    assert found["waits"] and found["live_processes"] == 0
    out = shows(tmp_path / "run", capsys)
    assert "from the event log" in out and found["waits"][0]["event"] in out
    assert not (tmp_path / "run" / STATUS_FILE).exists()


def test_the_former_command_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run_command(["watch", "runs/a"]) == exit_codes.USER_ERROR
    assert "laminar status --follow runs/a" in capsys.readouterr().err


def test_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert commands.run_command(["status", "--follow", str(path)]) == exit_codes.USER_ERROR
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(path) in said
    assert status.POLL_S < status.ALIVE_S
