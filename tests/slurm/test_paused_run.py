"""Runs that pause on a Slurm, and go on: by themselves after a warning, else when the user asks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laminar.cluster.slurm import Jobs, read_jobs
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from tests.run.conftest import Finished, check_books, history, laminar
from tests.run.test_pauses import WORDS
from tests.slurm.conftest import Lab, until
from tests.slurm.test_submitted_run import steps

pytestmark = [pytest.mark.slurm, pytest.mark.process]
ENDLESS = ["trainer.total_training_steps=5000", "slurm.rollouts=1", "rollout.replicas=1"]


def submitted(lab: Lab, name: str, *words: str) -> tuple[Path, Jobs]:
    """A run that trains, with both machines."""
    place = [f"run.output_dir={lab.runs}", f"run.name={name}", *words]
    done = laminar("submit", *WORDS, *ENDLESS, *place)
    assert done.returncode == 0, done.stderr
    run = lab.runs / name
    until(lambda: steps(run) >= 2 and nodes_joined(run, "node-1") == [0], "both machines are there")
    return run, turn(run)


def logged(run: Path) -> list[Event | Command]:
    return list(history(run)) if (run / "events").is_dir() else []


def nodes_joined(run: Path, name: str) -> list[int]:
    """How often the job of each node of this name was started before."""
    joined = [e for e in logged(run) if isinstance(e, ev.ActorJoined) and e.name == name]
    return [e.job_restarts for e in joined]


def turn(run: Path) -> Jobs:
    jobs = read_jobs(run)
    assert jobs is not None
    return jobs


def slurm(*words: str) -> None:
    subprocess.run(words, check=True)


def ended(lab: Lab, run: Path, job: str) -> Finished:
    """The user ends it, and nothing is left in the queue."""
    stopped = laminar("stop", str(run))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: not lab.queue(), "the queue is empty")
    found = Finished(run, 0, (run / "logs" / "slurm" / f"service-{job}.log").read_text())
    check_books(found)
    done = [line["step"] for line in found.metrics() if "reward/mean" in line]
    assert done == [*range(1, found.summary["steps"] + 1)]
    assert not [e for e in logged(run) if isinstance(e, cmd.RepeatStep)]
    return found


def test_a_run_that_slurm_warns_goes_on_by_itself(lab: Lab) -> None:
    """Then its rollout machine alone is taken away, and has its place again."""
    run, jobs = submitted(lab, "warned")
    slurm("scancel", "--batch", "--signal=USR1", jobs.service)
    until(lambda: nodes_joined(run, "node-1") == [0, 1], "the held task was released")
    before = steps(run)
    until(lambda: steps(run) >= before + 2, "it trains")
    assert [e.asked for e in logged(run) if isinstance(e, ev.RunResumed)] == [True]
    slurm("scontrol", "requeue", f"{jobs.rollouts[0]}_1")
    until(lambda: nodes_joined(run, "node-1") == [0, 1, 2], "the machine has its place again")
    said = ended(lab, run, jobs.service).output
    assert f"scontrol requeue {jobs.service}" in said and f"release {jobs.rollouts[0]}" in said


def test_a_run_that_the_user_pauses_leaves_the_queue_and_goes_on_when_asked(lab: Lab) -> None:
    run, _ = submitted(lab, "paused")
    done = laminar("stop", str(run), "--pause")
    assert done.returncode == 0 and "submit --resume" in done.stdout, done
    until(lambda: not lab.queue(), "no task waits")
    before = steps(run)
    again = laminar("submit", "--resume", str(run))
    assert again.returncode == 0, again.stderr
    until(lambda: steps(run) >= before + 2, "it trains")
    ended(lab, run, turn(run).service)


def test_where_no_job_can_be_put_back_its_successor_goes_on(lab: Lab) -> None:
    """After a warning the books are whole; after the death of the machine, too, nobody is missing;
    and no job is left when the run has ended."""
    run, first = submitted(lab, "chained", "slurm.chain=true")
    until(lambda: turn(run).next != [], "the successor is queued")
    slurm("scancel", "--batch", "--signal=USR1", first.service)
    until(lambda: nodes_joined(run, "node-1") == [0, 0], "the successor's machine is there")
    before, second = steps(run), turn(run)
    until(lambda: steps(run) >= before + 2, "it trains")
    assert second.before == 1 and second.service != first.service
    assert {job.partition("_")[0] for job in lab.queue()} == set(second.ids)
    node = lab.queue()[second.service][1]
    lab.node("kill-node", node)
    until(lambda: nodes_joined(run, "node-1") == [0, 0, 0], "the one after that has begun")
    lab.node("start-node", node)
    before, third = steps(run), turn(run)
    until(lambda: steps(run) >= before + 2, "it trains")
    assert third.before == 2
    stopped = laminar("stop", str(run))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: not lab.queue(), "the queue is empty")
    said = (run / "logs" / "slurm" / f"service-{third.service}.log").read_text()
    check_books(Finished(run, 0, said))
