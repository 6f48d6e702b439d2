"""The supervisor: what it makes of signals, and what its coordinators get to hear."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from laminar.cli.commands import build_parser
from laminar.config import Config, load_config
from laminar.coordinator.restarts import GiveUp
from laminar.core.state.failures import FailureKind
from laminar.launch import supervisor as supervisor_module
from laminar.launch import train
from laminar.launch.preflight import RunPlan, look_at_data
from laminar.launch.prefork import PreforkedNode
from laminar.launch.supervisor import StopRequest, Supervisor, node_args
from laminar.launch.train import prepare_directory
from laminar.names import exit_codes
from laminar.run.lock import RunLock

HANDLED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
HEAR = """
import sys
with open(sys.argv[1], "a") as heard:
    heard.write(sys.stdin.readline())
sys.exit(int(sys.argv[2]))
"""
IGNORE = "import sys; sys.stdin.read(); import time; time.sleep(60)"
STAND_STILL = "import os, sys, time; os.write(int(sys.argv[1]), b'.'); time.sleep(60)"
"""It has made a turn, and makes no other."""


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "level"),
    [
        ("SIGTERM", StopRequest.DRAIN),
        ("SIGHUP SIGTERM SIGTERM", StopRequest.DRAIN),  # a batch system repeats itself
        ("SIGUSR2", StopRequest.DRAIN),
        ("SIGUSR1 SIGUSR1", StopRequest.PAUSE),
        ("SIGUSR1 SIGINT", StopRequest.DRAIN),
        ("SIGTERM SIGUSR1", StopRequest.DRAIN),
        ("SIGUSR1 SIGINT SIGINT", StopRequest.NOW),
        ("SIGINT", StopRequest.DRAIN),
        ("SIGINT SIGTERM", StopRequest.DRAIN),
        ("SIGTERM SIGINT", StopRequest.NOW),
        ("SIGINT SIGINT", StopRequest.NOW),
        ("SIGQUIT", StopRequest.NOW),
        ("SIGINT SIGINT SIGINT SIGINT", StopRequest.BY_FORCE),
        ("SIGQUIT SIGINT SIGTERM", StopRequest.BY_FORCE),
    ],
)
def test_what_signals_ask_for(signals: str, level: int) -> None:
    """In good order by SIGTERM and SIGHUP, however often; each Ctrl-C asks for more."""
    with StopRequest() as asked:
        for name in signals.split():
            os.kill(os.getpid(), signal.Signals[name])
    assert asked.level == level


def test_in_a_batch_job_sigterm_asks_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit and a preemption come as one; `laminar stop` still ends the run."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with StopRequest() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.level == StopRequest.PAUSE
        os.kill(os.getpid(), signal.SIGUSR2)
        assert asked.level == StopRequest.DRAIN


def test_under_nohup_a_closed_terminal_asks_for_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
    assert asked.level == StopRequest.NOTHING


class StandIns(Supervisor):
    """Its processes are small scripts; each coordinator ends with the next of the codes."""

    def __init__(self, run_dir: Path, signals: str, *codes: int | str | None) -> None:
        """`signals` arrive when the first process was started; code None: it ends by no word; a
        text: it is the script, which is given the descriptor of its turns."""
        config = load_config(
            [], ["model.name=m", "data.dataset=gcd", "recovery.coordinator_restart_ms=0"]
        )
        run_dir.mkdir()
        self.heard, self.codes, self.signals = run_dir / "heard", [*codes], signals.split()
        lock = RunLock.create(run_dir, "train")
        super().__init__(config, lock, Console(quiet=True), StopRequest().__enter__())

    def _start(
        self, module: str, *options: str, fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        code = self.codes.pop(0) if module == "laminar.cli.coord" else None
        script = ["-c", IGNORE] if code is None else ["-c", HEAR, str(self.heard), str(code)]
        script = ["-c", code, options[-1]] if isinstance(code, str) else script
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *script], stdin=pipe, bufsize=0, start_new_session=True, pass_fds=fds
        )
        while self.signals:
            os.kill(os.getpid(), signal.Signals[self.signals.pop(0)])
        return process


def test_afterwards_signals_do_what_they_did_before() -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    with StopRequest():
        assert [signal.getsignal(number) for number in HANDLED] != before
    assert [signal.getsignal(number) for number in HANDLED] == before


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "NODE_EXIT_S", 0.0)
    monkeypatch.setattr(supervisor_module, "TERM_S", 5.0)


def test_a_coordinator_that_is_started_again_hears_what_was_asked_of_the_former(
    tmp_path: Path,
) -> None:
    """Also when the former had not got as far as listening."""
    supervisor = StandIns(tmp_path / "run", "SIGTERM", exit_codes.CRASHED, exit_codes.COMPLETE)
    assert supervisor.run().code == exit_codes.COMPLETE
    assert supervisor.heard.read_text() == "drain SIGTERM\n" * 2


def test_a_coordinator_is_told_to_pause_and_its_end_is_final(tmp_path: Path) -> None:
    supervisor = StandIns(tmp_path / "run", "SIGUSR1", exit_codes.PAUSED)
    assert supervisor.run().code == exit_codes.PAUSED
    assert supervisor.heard.read_text() == "pause SIGUSR1\n"


def test_at_once_without_a_coordinator_waits_for_none(tmp_path: Path) -> None:
    """It had died when the user asked; its processes are told to leave, and killed if need be."""
    supervisor = StandIns(tmp_path / "run", "SIGQUIT", exit_codes.CRASHED)
    over = supervisor.run()
    assert over == GiveUp.after_failure(FailureKind.STOPPED, "SIGQUIT")
    assert supervisor.heard.read_text() == "now SIGQUIT\n"
    assert all(node.returncode == -signal.SIGTERM for _, node in supervisor._nodes)


def test_by_force_kills_what_does_not_listen(tmp_path: Path) -> None:
    supervisor = StandIns(tmp_path / "run", "SIGINT SIGINT SIGINT", None)
    assert supervisor.run().code == exit_codes.STOPPED_EARLY
    assert supervisor._coordinator.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("stalls", "kind"), [(1, None), (2, FailureKind.STALLED)])
def test_a_coordinator_that_stands_still_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalls: int, kind: FailureKind | None
) -> None:
    monkeypatch.setattr(supervisor_module, "STILL_S", 0.2)
    codes = *[STAND_STILL] * stalls, exit_codes.COMPLETE
    over = (supervisor := StandIns(tmp_path / "run", "SIGTERM", *codes)).run()
    assert over.code == (exit_codes.FAILED if kind else exit_codes.COMPLETE)
    assert (over.failure.kind if over.failure else None) == kind
    assert len(supervisor.codes) == stalls - 1
    assert kind or supervisor.heard.read_text() == "drain SIGTERM\n"


def test_one_that_never_told_of_a_turn_still_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have a long log to read."""
    monkeypatch.setattr(supervisor_module, "STILL_S", 0.0)
    slow = f"import time; time.sleep(1.0); raise SystemExit({exit_codes.FAILED})"
    assert StandIns(tmp_path / "run", "", slow).run().code == exit_codes.FAILED


def test_a_run_ends_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TERM_S", 0.2)
    monkeypatch.setattr(supervisor_module, "NOTICE_S", 0.1)
    supervisor = StandIns(tmp_path / "run", "", None)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    over = supervisor.run()
    assert over.code == exit_codes.USER_ERROR
    assert f"{tmp_path / 'run'} is gone" in over.failure.sentence
    assert not (tmp_path / "run").exists()


def test_nodes_of_a_run_beyond_loopback_find_their_own_address() -> None:
    here = load_config([], ["model.name=m", "data.dataset=gcd"])
    assert node_args(here, "node-1")[-2:] == ["--host", "127.0.0.2"]
    trainer = ["--name", "trainer-node-1", "--roles", "ranks:1", "--host", "127.0.1.1"]
    assert node_args(here, "trainer-node-1") == trainer
    beyond = load_config([], ["model.name=m", "data.dataset=gcd", "coordinator.host=10.1.2.3"])
    assert "--host" not in node_args(beyond, "node-1")


def test_a_node_that_was_killed_before_the_run_began_is_replaced(tmp_path: Path) -> None:
    """Not taken for a closed output (exit code 141), with the directory left."""

    class Dead:
        def start_node(self, words: Sequence[str], lock_fd: int) -> subprocess.Popen[bytes]:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    supervisor = StandIns(tmp_path / "run", "SIGTERM", exit_codes.COMPLETE)
    supervisor._early = {"node-0": cast("PreforkedNode", Dead())}
    assert supervisor.run().code == exit_codes.COMPLETE
    assert [name for name, _ in supervisor._nodes] == ["node-0"]


def test_a_run_stopped_before_its_coordinator_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoNode:
        def __init__(self, *arguments: object) -> None:
            pass

        def look_at_data(self, config: Config) -> RunPlan:
            return look_at_data(config)

        def close(self) -> None:
            pass

    def prepare(*arguments: Any) -> RunLock:
        lock = prepare_directory(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return lock

    monkeypatch.setattr(train, "PreforkedNode", NoNode)
    monkeypatch.setattr(train, "prepare_directory", prepare)
    words = ["train", f"run.output_dir={tmp_path}", "rollout.engine=emulated"]
    arguments = build_parser().parse_args(words)
    assert arguments.function(arguments) == exit_codes.STOPPED_EARLY
    assert not list(tmp_path.iterdir())
