"""A trainer of two nodes on a Slurm: its run reaches a time limit, and one node is preempted."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import is_trainer_node
from laminar.names.roles import Role
from tests.run.conftest import Finished, check_books, laminar
from tests.slurm.conftest import Lab, until
from tests.slurm.test_paused_run import logged, nodes_joined, slurm, turn
from tests.slurm.test_submitted_run import SUBMIT, steps

pytestmark = [pytest.mark.slurm, pytest.mark.process]
MACHINES = [
    "trainer.nodes=2", "trainer.ranks=2", "slurm.trainer_spares=1", "slurm.rollouts=2",
    "trainer.total_training_steps=500", "trainer.test_freq=0",
]  # fmt: skip


def trains(run: Path, count: int) -> None:
    before = steps(run)
    until(lambda: steps(run) >= before + count, f"{count} more steps")


def trainer_nodes(run: Path) -> list[str]:
    """The trainer node of each start of one."""
    joined = (e for e in logged(run) if isinstance(e, ev.ActorJoined))
    return [e.name for e in joined if e.role == Role.NODE and is_trainer_node(e.name)]


def test_a_trainer_of_two_nodes_outlives_a_time_limit_and_a_preemption(lab: Lab) -> None:
    """Slurm warns service and trainer node at once: the step completes on the ranks of both. Each
    time the spare has the place, and after the preemption the trainer begins at its checkpoint."""
    place = [f"run.output_dir={lab.runs}", "run.name=trainers"]
    submitted = laminar(*SUBMIT, *MACHINES, *place)
    assert submitted.returncode == 0, submitted.stderr
    run = lab.runs / "trainers"
    until(lambda: bool(nodes_joined(run, "node-2")), "the rollout machines are there")
    trains(run, 3)
    jobs = turn(run)
    assert trainer_nodes(run) == ["trainer-node-1"]
    slurm("scancel", "--batch", "--signal=USR1", f"{jobs.trainers[0]}_1", jobs.service)
    until(lambda: nodes_joined(run, "node-0") == [0, 1], "the service is back")
    trains(run, 3)
    assert trainer_nodes(run) == ["trainer-node-1", "trainer-node-2"]
    assert [e.asked for e in logged(run) if isinstance(e, ev.RunResumed)] == [True]
    assert not [e for e in logged(run) if isinstance(e, cmd.RepeatStep)]
    slurm("scontrol", "requeue", f"{jobs.trainers[0]}_2")
    until(lambda: nodes_joined(run, "trainer-node-1") == [0, 1], "the other has the place")
    trains(run, 3)
    stopped = laminar("stop", str(run))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: not lab.queue(), "the queue is empty")
    check_books(Finished(run, 0, stopped.stdout))
    again = laminar("retrain", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
