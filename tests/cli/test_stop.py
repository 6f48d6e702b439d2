"""laminar stop: whom it asks, what it waits for, and what it says; processes are stand-ins."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laminar.cli import commands, stop
from laminar.config import dump_config, load_config
from laminar.net import user_requests
from laminar.net.client import write_address
from laminar.run.directory import CONFIG_FILE, COORDINATOR_FILE, STATUS_FILE
from laminar.run.secret import make_secret

STAND_IN = """
import signal, sys
from pathlib import Path
from laminar.run.lock import RunLock
run_dir, name, *heeds = sys.argv[1:]
for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: None)
def heard(number, frame):
    print(name, signal.Signals(number).name, flush=True)
    raise SystemExit
for word in heeds:
    signal.signal(signal.Signals[word], heard)
lock = RunLock.join(Path(run_dir), name)
print("ready", flush=True)
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    config = load_config([], ["model.name=m", "data.dataset=gcd"])
    (tmp_path / "run" / CONFIG_FILE).write_text(dump_config(config))
    return tmp_path / "run"


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    """A process of the run that ends on the signals named, and on no others."""
    made: list[subprocess.Popen[str]] = []

    def one(name: str, *heeds: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", STAND_IN, str(run_dir), name, *heeds]
        made.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == "ready\n"
        return made[-1]

    yield one
    for process in made:
        process.kill()
        process.communicate()


def ended_by(process: subprocess.Popen[str]) -> str:
    process.wait(10)
    assert process.stdout is not None
    return process.stdout.read().strip()


def test_a_run_that_is_not_running_is_one_sentence(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert commands.run_command(["stop", str(run_dir)]) == 0
        assert capsys.readouterr().out == f"{run_dir} is not running\n"


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_run_is_a_mistake(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run_command(["stop", str(tmp_path / name)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "options", "asked"),
    [
        (("train", "coordinator"), (), "train SIGUSR2"),
        (("train", "trainer-0"), ("--now",), "train SIGQUIT"),
        (("train", "coordinator"), ("--pause",), "train SIGUSR1"),
        (("coordinator", "node-0"), (), "coordinator SIGUSR2"),
        (("coordinator", "node-0"), ("--pause",), "coordinator SIGUSR1"),
        (("coordinator", "node-0"), ("--now",), "coordinator SIGQUIT"),
        (("node-0", "store-0"), ("--now",), "node-0 SIGTERM"),
    ],
)
def test_whoever_is_in_charge_is_asked_and_the_others_are_waited_for(
    run_dir: Path,
    start: Start,
    names: tuple[str, str],
    options: tuple[str, ...],
    asked: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_charge, other = start(names[0], *asked.split()[1:]), start(names[1])
    monkeypatch.setattr(stop, "SAY_S", 0.0)
    waiting = threading.Event()
    monkeypatch.setattr(stop, "_describe_progress", lambda run_dir: waiting.set() or "")

    def follow() -> None:
        """The stand-in of the other process ends when the first has, and is being waited for."""
        in_charge.wait(20)
        waiting.wait(20)
        other.communicate("")

    following = threading.Thread(target=follow, daemon=True)
    following.start()
    assert commands.run_command(["stop", str(run_dir), *options]) == 0
    following.join(20)  # else it reads from the process at the same time as the fixture
    assert ended_by(in_charge) == asked
    said = capsys.readouterr().out
    to = "to pause" if "--pause" in options else "to end"
    assert f"asked {names[0]} (pid {in_charge.pid}) {to}" in said
    assert "waiting for" in said and names[1] in said
    assert f"{run_dir} has stopped\n" in said
    assert said.endswith("resumes it\n") == ("--pause" in options)


def test_at_the_deadline_it_names_who_is_left_and_what_to_do(
    run_dir: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf = start("coordinator")
    (run_dir / STATUS_FILE).write_text('{"phase": "exporting", "step": 7, "failure": ""}')
    assert commands.run_command(["stop", str(run_dir), "--timeout", "0.3"]) == 1
    said = capsys.readouterr().err
    assert f"is still running: coordinator (pid {deaf.pid})" in said
    assert f"laminar stop {run_dir} --now" in said


def test_a_coordinator_that_hangs_is_named(
    run_dir: Path, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start("coordinator")
    make_secret(run_dir)
    monkeypatch.setattr(stop, "SAY_S", 0.0)
    monkeypatch.setattr(user_requests, "TURN_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as accepting:
        address = f"tcp://127.0.0.1:{accepting.getsockname()[1]}"
        write_address(run_dir / COORDINATOR_FILE, address)
        assert commands.run_command(["stop", str(run_dir), "--timeout", "0.3"]) == 1
    said = capsys.readouterr().out
    assert "the coordinator does not respond" in said
    assert f"laminar stop {run_dir} --now` kills it" in said


def test_who_does_not_end_at_once_is_killed(
    run_dir: Path, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = [start("train"), start("rollout-0")]
    monkeypatch.setattr(stop, "KILL_AFTER_S", 0.3)
    assert commands.run_command(["stop", str(run_dir), "--now"]) == 0
    assert [process.wait(10) for process in deaf] == [-9, -9]
    said = capsys.readouterr().out
    assert "killing rollout-0" in said and "train" in said


def test_a_run_of_another_machine_whose_coordinator_is_silent_is_stopped_there(
    run_dir: Path, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/run/test_prepared_run.py has one that answers."""
    make_secret(run_dir)
    away, here = start("coordinator", "SIGTERM"), socket.gethostname()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setattr(user_requests, "ANSWER_S", 0.2)
    for address in ("", "tcp://127.0.0.1:1"):
        if address:
            write_address(run_dir / COORDINATOR_FILE, address)
        assert commands.run_command(["stop", str(run_dir)]) == 2
        said = capsys.readouterr().err
        assert f"coordinator (pid {away.pid} on {here})" in said and address in said
        assert said.endswith(f"laminar stop {run_dir}` there\n")
    assert away.poll() is None


def test_a_run_that_writes_no_checkpoints_is_not_paused(
    run_dir: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([], ["model.name=m", "data.dataset=gcd", "trainer.save_freq=0"])
    (run_dir / CONFIG_FILE).write_text(dump_config(config))
    process = start("train", "SIGUSR1")
    assert commands.run_command(["stop", str(run_dir), "--pause"]) == 2
    assert "trainer.save_freq = 0" in capsys.readouterr().err and process.poll() is None
