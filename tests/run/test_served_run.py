"""A run whose machines are served one by one: `laminar serve RUN`, `laminar serve RUN --node K`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.run.lock import holders
from tests.run.conftest import ROOT, Finished, check_books, command, history, laminar
from tests.run.test_interruptions import status, until
from tests.run.test_prepared_run import SETTINGS

pytestmark = pytest.mark.process
DEADLINE_S = 90
ENDLESS = "trainer.total_training_steps=2000"


class Served:
    """A run of two machines, and the processes that serve it."""

    def __init__(self, directory: Path) -> None:
        self.run, self._output = directory / "run", directory / "output"
        self._output.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def prepare(self, *settings: str) -> None:
        where = [f"run.output_dir={self.run.parent}", "run.name=run"]
        done = laminar("train", "--prepare", *SETTINGS, "rollout.replicas=1", *settings, *where)
        assert done.returncode == 0, done.stderr

    def serve(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        output = (self._output / str(len(self._started))).open("wb")
        with output:
            process = subprocess.Popen(
                command("serve", str(self.run), *options),
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )
        self._started.append(process)
        return process

    def output_of(self, process: subprocess.Popen[bytes]) -> str:
        return (self._output / str(self._started.index(process))).read_text()

    def ends(self, process: subprocess.Popen[bytes], code: int = exit_codes.COMPLETE) -> str:
        """What it has printed, once it has ended with this code."""
        process.wait(DEADLINE_S)
        assert process.returncode == code, self.output_of(process)
        return self.output_of(process)

    def status(self) -> dict[str, Any]:
        return status(self.run.parent)

    def trains(self, steps: int = 1) -> None:
        """Wait until it has trained as many further steps."""
        goal = self.status()["step"] + steps
        until(lambda: self.status()["step"] >= goal, f"step {goal}")

    def pid_of(self, name: str) -> int:
        until(lambda: any(h.name == name for h in holders(self.run)), f"{name} lives")
        return next(h.pid for h in holders(self.run) if h.name == name)

    def address(self) -> str:
        return str(json.loads((self.run / "coordinator.json").read_text())["address"])

    def check(self) -> None:
        """The run has ended, with nothing left of it."""
        check_books(Finished(self.run, 0, ""))
        assert holders(self.run) == []

    def close(self) -> None:
        if holders(self.run):
            laminar("stop", "--now", str(self.run))
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


@pytest.mark.long
def test_it_begins_what_is_prepared_and_goes_on_with_what_was_stopped(served: Served) -> None:
    served.prepare(ENDLESS)
    service, node = served.serve(), served.serve("--node", "1")
    until(lambda: "rollout-1.0" in served.status()["processes"], "node-1 has joined")
    served.trains()
    assert laminar("stop", str(served.run)).returncode == 0
    assert "step 1/2000" in served.ends(service)
    served.ends(node)
    before = served.status()["step"]
    service = served.serve()
    until(lambda: served.status()["step"] > before, "it goes on")
    service.send_signal(signal.SIGTERM)
    assert "stopping (SIGTERM)" in served.ends(service)
    assert [e.asked for e in history(served.run) if isinstance(e, ev.RunResumed)] == [True]
    assert sorted(path.name for path in (served.run / "logs").glob("attempt_*")) == [
        "attempt_1",
        "attempt_2",
    ]
    served.check()


@pytest.mark.long
def test_a_node_is_started_again_and_leaves_when_it_is_asked_to(served: Served) -> None:
    """And the run goes on without it, and with another one in its place."""
    served.prepare(ENDLESS)
    service, node = served.serve(), served.serve("--node", "1")
    os.kill(served.pid_of("node-1"), signal.SIGKILL)
    until(lambda: "exit code -9" in served.output_of(node), "its end is seen")
    until(lambda: "rollout-1.0" in served.status()["processes"], "it has joined again")
    node.send_signal(signal.SIGTERM)
    assert "ending node-1 (SIGTERM)" in served.ends(node)
    served.trains()
    other = served.serve("--node", "1")
    assert served.pid_of("rollout-1.0")
    service.send_signal(signal.SIGTERM)
    served.ends(service)
    served.ends(other)
    served.check()


def hide_locks(run: Path) -> None:
    """As on a file system that shows no machine the locks of another one."""
    for card in (run / "processes").iterdir():
        card.unlink()


@pytest.mark.long
def test_a_second_service_of_a_live_run_ends_and_changes_nothing(served: Served) -> None:
    """Whether it sees the locks of the first, or only that its coordinator answers."""
    served.prepare(ENDLESS)
    service = served.serve()
    served.trains()
    serving = served.pid_of("coordinator")
    for said in (
        "is served already, by serve (pid",
        "already has a coordinator at tcp://127.0.0.1:",
    ):
        assert said in served.ends(served.serve(), exit_codes.USER_ERROR)
        second = subprocess.run(
            [sys.executable, "-m", "laminar.cli.coord", str(served.run)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert second.returncode == exit_codes.USER_ERROR, second.stderr
        assert said.replace("serve (", "coordinator (") in second.stderr
        hide_locks(served.run)
    served.trains()
    os.kill(serving, 0)
    service.send_signal(signal.SIGTERM)
    assert "coordinator ended" not in served.ends(service)
    assert sum(isinstance(e, ev.CoordinatorStarted) for e in history(served.run)) == 1
    served.check()


STARTED_AGAIN = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.mark.long
def test_a_service_that_slurm_starts_again_stands_by_while_its_former_copy_lives(
    served: Served,
) -> None:
    """The daemon of that machine had died alone; once it is back, it kills the copy."""
    served.prepare(ENDLESS)
    former = served.serve()
    served.trains()
    newcomer = served.serve(**STARTED_AGAIN)
    until(lambda: "standing by" in served.output_of(newcomer), "it waits")
    assert "is served already, by serve (pid" in served.output_of(newcomer)
    served.trains()
    for process in [*psutil.Process(former.pid).children(recursive=True), former]:
        process.kill()
    before = served.status()["step"]
    until(lambda: served.status()["step"] > before, "the newcomer goes on")
    assert laminar("stop", str(served.run)).returncode == 0
    served.ends(newcomer)
    served.check()


@pytest.mark.long
@pytest.mark.parametrize("end", ["pause", "signal"])
def test_a_service_that_stands_by_leaves_where_it_is_not_needed(served: Served, end: str) -> None:
    """The user has paused the run; or it is this job that is to end."""
    served.prepare(ENDLESS)
    former = served.serve()
    served.trains()
    newcomer = served.serve(**STARTED_AGAIN)
    until(lambda: "standing by" in served.output_of(newcomer), "it waits")
    if end == "pause":
        assert laminar("stop", "--pause", str(served.run)).returncode == 0
        served.ends(former, exit_codes.PAUSED)
        assert "was paused" in served.ends(newcomer, exit_codes.USER_ERROR)
    else:
        newcomer.send_signal(signal.SIGTERM)
        assert "is served already" in served.ends(newcomer, exit_codes.USER_ERROR)
        served.trains()
        former.send_signal(signal.SIGTERM)
        served.ends(former)
    check_books(Finished(served.run, 0, ""))


@pytest.mark.long
def test_of_two_copies_of_a_service_the_one_that_cannot_answer_ends(served: Served) -> None:
    """Its coordinator stands still, and has the port. The newcomer takes the log over all the
    same, and the former one ends when it sees that."""
    served.prepare(ENDLESS)
    former = served.serve()
    served.trains()
    coordinator, address = served.pid_of("coordinator"), served.address()
    os.kill(coordinator, signal.SIGSTOP)
    hide_locks(served.run)
    newcomer = served.serve()
    until(lambda: served.address() != address, "another coordinator listens elsewhere")
    os.kill(coordinator, signal.SIGCONT)
    assert "took over the log; end this one" in served.ends(former, exit_codes.USER_ERROR)
    served.trains()
    newcomer.send_signal(signal.SIGTERM)
    served.ends(newcomer)
    served.check()


@pytest.mark.long
def test_a_coordinator_that_stands_still_is_replaced(served: Served) -> None:
    served.prepare(ENDLESS)
    service = served.serve()
    served.trains()
    os.kill(served.pid_of("coordinator"), signal.SIGSTOP)
    until(lambda: "made no progress for 30 s: killed" in served.output_of(service), "it is killed")
    served.trains()
    service.send_signal(signal.SIGTERM)
    served.ends(service)
    assert sum(isinstance(e, ev.CoordinatorStarted) for e in history(served.run)) == 2
    served.check()


def test_of_a_finished_run_it_says_how_that_ended_and_a_node_leaves_at_once(served: Served) -> None:
    served.prepare("trainer.total_training_steps=1")
    assert "1 in " in served.ends(served.serve())
    assert "1 in " in served.ends(served.serve())
    assert "node-7 leaves: the run is over" in served.ends(served.serve("--node", "7"))
    served.check()


@pytest.mark.long
def test_a_node_that_is_cut_off_while_the_run_ends_leaves_when_it_is_back(served: Served) -> None:
    served.prepare(ENDLESS)
    service, node = served.serve(), served.serve("--node", "1")
    assert served.pid_of("rollout-1.0")
    served.trains()
    pid = served.pid_of("node-1")
    os.kill(pid, signal.SIGSTOP)
    service.send_signal(signal.SIGTERM)
    served.ends(service)
    os.kill(pid, signal.SIGCONT)
    assert "node-1 leaves: the run is over" in served.ends(node)
    served.check()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["nowhere", "--node", "-1"], "'node--1' is not a node name"),
        (["nowhere", "--trainer-node", "0"], "use node-0, node-1, ..., or trainer-node-1, ..."),
        (["nowhere", "--node", "x"], "invalid int value"),
        (["configs"], "is not a run directory"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    done = laminar("serve", *words)
    assert done.returncode == exit_codes.USER_ERROR and said in done.stderr
