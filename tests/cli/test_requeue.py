"""What `laminar serve` has Slurm do with jobs after a pause; Slurm is played by scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from laminar.cli import requeue
from laminar.cli.requeue import Job
from laminar.config import load
from laminar.run.directory import STATUS_FILE
from laminar.run.program import typed
from laminar.run.slurm import Jobs, write_jobs

SERVICE = {"SLURM_JOB_ID": "70"}
TASK = {"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}


class Slurm:
    """The commands, and a run with two jobs."""

    def __init__(self, directory: Path) -> None:
        self.calls, self.run_dir, self.said = directory / "calls", directory / "run", list[str]()
        (self.run_dir / "slurm").mkdir(parents=True)
        write_jobs(self.run_dir, Jobs(service="70", rollouts=["71"]))
        (directory / "bin").mkdir()
        self.calls.touch()
        for name, then in {"scontrol": '[ -z "$REFUSES" ] || { echo "$REFUSES" >&2; exit 1; }',
                           "scancel": "", "squeue": 'printf "$QUEUE"'}.items():  # fmt: skip
            program = directory / "bin" / name
            log = "" if name == "squeue" else f'echo {name} "$@" >>{self.calls}'
            program.write_text(f"#!/bin/bash\n{log}\n{then}\n")
            program.chmod(0o755)

    def job(self, environment: dict[str, str], restarts: int = 0, most: int = 3) -> Job:
        config = load([], ["model.name=m", "data.dataset=gcd", f"slurm.max_requeues={most}"])
        started = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        return Job(config, self.run_dir, self.said.append, {**environment, **started})

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(requeue, "POLL_S", 0.0)
    return Slurm(tmp_path)


def test_a_service_that_slurm_has_warned_is_put_back(slurm: Slurm) -> None:
    slurm.job(SERVICE, restarts=2).service_paused("SIGUSR1")
    assert slurm.called == slurm.said == ["scontrol requeue 70"]


def test_a_pause_that_the_user_asked_for_is_his_to_end(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task stays in the queue, in whose place a new job would be."""
    monkeypatch.setenv(
        "QUEUE", r"71_1|72|71|PENDING||held\n71_2|73|71|PENDING||held\n99|99|99|RUNNING|n1|None\n"
    )
    slurm.job(SERVICE).service_paused("")
    assert slurm.called == ["scancel 71"]
    assert slurm.said == [f"`{typed('submit', '--resume', slurm.run_dir)}` goes on with it"]


def test_a_task_that_still_runs_is_waited_for_before_the_others_are_cancelled(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE", r"71_1|72|71|COMPLETING|n1|None\n")
    monkeypatch.setattr(requeue, "LEAVE_S", 0.3)
    slurm.job(SERVICE).service_paused("")
    assert slurm.called == ["scancel 71"]


def test_what_slurm_or_the_user_has_decided_is_left_as_it_is(slurm: Slurm) -> None:
    """A requeue of the service by hand, a preemption, scancel."""
    slurm.job(SERVICE).service_paused("SIGTERM")
    assert not slurm.called and not slurm.said


def test_a_job_is_put_back_so_often_and_no_more(slurm: Slurm) -> None:
    slurm.job(SERVICE, restarts=3).service_paused("SIGUSR1")
    assert not slurm.called
    assert "was started again 3 times, and slurm.max_requeues is 3" in slurm.said[0]
    assert "submit --resume" in slurm.said[1]


def test_where_slurm_refuses_the_one_command_is_said(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "scontrol: error: Requested operation is presently disabled")
    slurm.job(SERVICE).service_paused("SIGUSR1")
    assert "presently disabled" in slurm.said[0] and "submit --resume" in slurm.said[1]


def test_a_task_of_a_paused_run_is_held_until_the_next_service_releases_it(slurm: Slurm) -> None:
    slurm.job(TASK).node_paused()
    slurm.job(SERVICE).begins()
    slurm.job(SERVICE, restarts=1).begins()
    assert slurm.called == ["scontrol requeuehold 71_2", "scontrol release 71"]


@pytest.mark.parametrize(("pause", "how"), [("", "requeue"), ("pausing", "requeuehold")])
def test_a_machine_that_leaves_alone_is_put_back(slurm: Slurm, pause: str, how: str) -> None:
    (slurm.run_dir / STATUS_FILE).write_text(json.dumps({"pause": pause}))
    slurm.job(TASK).node_left("SIGTERM")
    assert not slurm.called
    slurm.job(TASK).node_left("SIGUSR1")
    assert slurm.called == [f"scontrol {how} 71_2"]


def test_without_a_batch_system_nothing_is_asked(slurm: Slurm) -> None:
    job = slurm.job({})
    job.begins()
    job.service_paused("SIGUSR1")
    job.node_paused()
    job.node_left("SIGUSR1")
    assert not slurm.called and not slurm.said
