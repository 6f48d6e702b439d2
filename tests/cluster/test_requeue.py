"""What `laminar serve` has Slurm do with jobs after a pause; Slurm is played by scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from laminar.cli import serve
from laminar.cluster import job_chain, requeue
from laminar.cluster.requeue import SlurmJob
from laminar.cluster.slurm import Jobs, read_jobs, write_jobs
from laminar.config import ConfigError, load_config
from laminar.launch.supervisor import StopRequest
from laminar.launch.terminal import Terminal
from laminar.names import exit_codes
from laminar.net.auth import RunKeys
from laminar.run.command_line import shell_command
from laminar.run.directory import STATUS_FILE
from laminar.run.lock import AlreadyServed, holders
from laminar.run.secret import Secret

SERVICE = {"SLURM_JOB_ID": "70"}
TASK = {"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}


CHAIN = "slurm.chain=true"
SBATCH = """\
[ -z "$NO_SBATCH" ] || { echo "sbatch: error: $NO_SBATCH" >&2; exit 1; }
grep -c sbatch ${0%/bin/sbatch}/calls
"""


class Slurm:
    """The commands, and a run with two jobs."""

    def __init__(self, directory: Path) -> None:
        self.calls, self.run_dir, self.said = directory / "calls", directory / "run", list[str]()
        (self.run_dir / "slurm").mkdir(parents=True)
        write_jobs(self.run_dir, Jobs(service="70", rollouts=["71"]))
        (directory / "bin").mkdir()
        self.calls.touch()
        for name, then in {"scontrol": '[ -z "$REFUSES" ] || { echo "$REFUSES" >&2; exit 1; }',
                           "sbatch": SBATCH, "scancel": "",
                           "squeue": 'printf "$QUEUE"'}.items():  # fmt: skip
            program = directory / "bin" / name
            log = "" if name == "squeue" else f'echo {name} "$@" >>{self.calls}'
            program.write_text(f"#!/bin/bash\n{log}\n{then}\n")
            program.chmod(0o755)

    def job(
        self, environment: dict[str, str], *words: str, restarts: int = 0, most: int = 3
    ) -> SlurmJob:
        given = ["model.name=m", "data.dataset=gcd", f"slurm.max_requeues={most}", *words]
        config = load_config([], given)
        started = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        return SlurmJob(config, self.run_dir, self.said.append, {**environment, **started})

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(requeue, "POLL_S", 0.0)
    monkeypatch.setattr(job_chain, "POLL_S", 0.0)
    return Slurm(tmp_path)


def test_a_service_that_slurm_has_warned_is_put_back(slurm: Slurm) -> None:
    slurm.job(SERVICE, restarts=2).service_ended(exit_codes.PAUSED, "SIGUSR1")
    assert slurm.called == slurm.said == ["scontrol requeue 70"]


def test_a_pause_that_the_user_asked_for_is_his_to_end(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task stays in the queue, in whose place a new job would be."""
    monkeypatch.setenv(
        "QUEUE", r"71_1|72|71|PENDING||held\n71_2|73|71|PENDING||held\n99|99|99|RUNNING|n1|None\n"
    )
    slurm.job(SERVICE).service_ended(exit_codes.PAUSED, "")
    assert slurm.called == ["scancel 71"]
    assert slurm.said == [f"`{shell_command('submit', '--resume', slurm.run_dir)}` resumes it"]


def test_a_task_that_still_runs_is_waited_for_before_the_others_are_cancelled(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE", r"71_1|72|71|COMPLETING|n1|None\n")
    monkeypatch.setattr(requeue, "LEAVE_S", 0.3)
    slurm.job(SERVICE).service_ended(exit_codes.PAUSED, "")
    assert slurm.called == ["scancel 71"]


def test_what_slurm_or_the_user_has_decided_is_left_as_it_is(slurm: Slurm) -> None:
    """A requeue of the service by hand, a preemption, scancel."""
    slurm.job(SERVICE).service_ended(exit_codes.PAUSED, "SIGTERM")
    assert not slurm.called and not slurm.said


def test_a_job_is_put_back_so_often_and_no_more(slurm: Slurm) -> None:
    slurm.job(SERVICE, restarts=3).service_ended(exit_codes.PAUSED, "SIGUSR1")
    assert not slurm.called
    assert "was restarted 3 times, and slurm.max_requeues is 3" in slurm.said[0]
    assert "submit --resume" in slurm.said[1]


def test_where_slurm_refuses_the_one_command_is_said(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "scontrol: error: Requested operation is presently disabled")
    slurm.job(SERVICE).service_ended(exit_codes.PAUSED, "SIGUSR1")
    assert "presently disabled" in slurm.said[0] and "submit --resume" in slurm.said[1]


def test_a_task_of_a_paused_run_is_held_until_the_next_service_releases_it(slurm: Slurm) -> None:
    slurm.job(TASK).node_paused()
    slurm.job(SERVICE).handle_service_start()
    slurm.job(SERVICE, restarts=1).handle_service_start()
    assert slurm.called == ["scontrol requeuehold 71_2", "scontrol release 71"]
    write_jobs(slurm.run_dir, Jobs(service="70", trainers=["72"], rollouts=["71"]))
    slurm.job(SERVICE, restarts=1).handle_service_start()
    assert slurm.called[2:] == ["scontrol release 72", "scontrol release 71"]


@pytest.mark.parametrize(("pause", "how"), [("", "requeue"), ("pausing", "requeuehold")])
def test_a_machine_that_leaves_alone_is_put_back(slurm: Slurm, pause: str, how: str) -> None:
    (slurm.run_dir / STATUS_FILE).write_text(json.dumps({"pause": pause}))
    slurm.job(TASK).node_left("SIGTERM")
    assert not slurm.called
    slurm.job(TASK).node_left("SIGUSR1")
    assert slurm.called == [f"scontrol {how} 71_2"]


def test_without_a_batch_system_nothing_is_asked(slurm: Slurm) -> None:
    job = slurm.job({})
    job.handle_service_start()
    job.service_ended(exit_codes.PAUSED, "SIGUSR1")
    job.node_paused()
    job.node_left("SIGUSR1")
    assert not slurm.called and not slurm.said


def turns(slurm: Slurm, job: SlurmJob) -> list[str]:
    """What has been asked since, when the service of this job has begun."""
    before = len(slurm.called)
    job.handle_service_start()
    place = f"{slurm.run_dir.absolute()}/slurm"
    return [line.replace(place, "RUN") for line in slurm.called[before:]]


def test_each_service_of_a_chain_queues_its_successor(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of the successor wait for it, and those of the former turn leave."""
    monkeypatch.setenv("QUEUE", r"71_1|72|71|RUNNING|n2|None\n")
    words = [CHAIN, "slurm.rollouts=2", "trainer.nodes=2"]
    first = turns(slurm, slurm.job(SERVICE, *words))
    service = "sbatch --parsable --dependency=afternotok:{} RUN/service.sbatch"
    rollout = "sbatch --parsable --dependency=after:{} RUN/rollout.sbatch"
    trainer = rollout.replace("rollout", "trainer")
    assert first == [service.format("70"), trainer.format("1"), rollout.format("1")]
    assert read_jobs(slurm.run_dir) == Jobs(service="70", rollouts=["71"], next=["1", "2", "3"])
    second = turns(slurm, slurm.job({"SLURM_JOB_ID": "1"}, *words))
    after = [service.format("1"), trainer.format("4"), rollout.format("4")]
    assert second == ["scancel 71", *after]
    later = Jobs(service="1", trainers=["2"], rollouts=["3"], next=["4", "5", "6"], before=1)
    assert read_jobs(slurm.run_dir) == later
    assert slurm.said[-1] == "slurm.chain: job 4 continues when this one ends"


def test_a_service_of_a_chain_that_slurm_ends_leaves_its_successor(slurm: Slurm) -> None:
    """And has nothing put back, as little as a node does."""
    job = slurm.job(SERVICE, CHAIN)
    job.handle_service_start()
    asked = slurm.called
    job.service_ended(exit_codes.PAUSED, "SIGTERM")
    job.service_ended(exit_codes.PAUSED, "SIGUSR1")
    assert slurm.said[-1] == "job 1 resumes it"
    slurm.job(TASK, CHAIN).node_paused()
    slurm.job(TASK, CHAIN).node_left("SIGUSR1")
    assert slurm.called == asked


@pytest.mark.parametrize(
    "code", [exit_codes.COMPLETE, exit_codes.FAILED, exit_codes.USER_ERROR, exit_codes.PAUSED]
)
def test_a_chain_ends_where_the_run_does(slurm: Slurm, code: int) -> None:
    """Its user has paused it, or there is nothing to go on with. Nodes first: theirs is the job
    that Slurm starts when the service it waits for is cancelled."""
    job = slurm.job(SERVICE, CHAIN, "slurm.rollouts=2")
    job.handle_service_start()
    job.service_ended(code, "")
    assert slurm.called[2:] == ["scancel 2", "scancel 1"]


def test_a_chain_has_so_many_jobs_and_no_more(slurm: Slurm) -> None:
    write_jobs(slurm.run_dir, Jobs(service="70", rollouts=["71"], before=3))
    job = slurm.job(SERVICE, CHAIN)
    assert turns(slurm, job) == []
    job.service_ended(exit_codes.PAUSED, "SIGUSR1")
    assert "3 jobs ran before, the limit of slurm.max_requeues" in slurm.said[0]
    assert "submit --resume" in slurm.said[1]


def test_where_a_node_may_queue_nothing_the_run_goes_on_without_a_successor(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_SBATCH", "Access/permission denied")
    job = slurm.job(SERVICE, CHAIN)
    job.handle_service_start()
    assert "Access/permission denied" in slurm.said[0]
    job.service_ended(exit_codes.PAUSED, "SIGUSR1")
    assert "submit --resume" in slurm.said[1]
    assert read_jobs(slurm.run_dir) == Jobs(service="70", rollouts=["71"])


def test_a_job_that_was_not_submitted_has_no_successor(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_chain, "SUBMIT_S", 0.0)
    slurm.job({"SLURM_JOB_ID": "99"}, CHAIN).handle_service_start()
    assert not slurm.called and "job 99 was not submitted" in slurm.said[0]


def test_a_run_that_was_paused_in_the_very_moment_of_asking_is_left_alone(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former copy serves it when the newcomer asks first, and pauses it and ends while it asks
    again; before that its last word was another one."""
    asked: list[str] = []

    def ask(run_dir: Path, keys: RunKeys) -> None:
        asked.append("")
        if len(asked) == 1:
            raise AlreadyServed("it is served already")
        (run_dir / STATUS_FILE).write_text(json.dumps({"pause": "paused"}))

    monkeypatch.setattr(serve, "check_unserved", ask)
    monkeypatch.setattr(serve, "STAND_BY_POLL_S", 0.0)
    (slurm.run_dir / STATUS_FILE).write_text(json.dumps({"pause": "pausing"}))
    newcomer, keys = slurm.job(SERVICE, restarts=1), RunKeys(Secret(b"a run"))
    with pytest.raises(ConfigError, match=r"was paused meanwhile: `\S+ submit --resume"):
        serve._take_in_turn(slurm.run_dir, keys, newcomer, StopRequest(), Terminal(plain=True))
    assert len(asked) == 2 and holders(slurm.run_dir) == []
