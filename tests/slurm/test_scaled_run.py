"""A run on a Slurm gets a machine more, loses it, and gets another one, while it trains."""

from __future__ import annotations

import pytest

from laminar.cluster.slurm import read_jobs
from tests.run.conftest import Finished, check_books, laminar
from tests.slurm.conftest import Lab, until
from tests.slurm.test_submitted_run import finished_by, steps

pytestmark = [pytest.mark.slurm, pytest.mark.process]
EMULATED = [
    "rollout.engine=emulated",
    "rollout.replicas=1",
    "data.dataset_size=10000",
    "data.val_size=2",
    "data.train_batch_size=4",
    "trainer.total_training_steps=5000",
    "emulation.train_s=0.3",
    "emulation.weights_mb=1",
]


def test_machines_come_and_go(lab: Lab) -> None:
    """The third task is a spare; once it has left, its place is taken by one more array."""
    place = [f"run.output_dir={lab.runs}", "run.name=scaled", "slurm.rollouts=2", "slurm.spares=1"]
    submitted = laminar("submit", *EMULATED, *place)
    assert submitted.returncode == 0, submitted.stderr
    run = lab.runs / "scaled"

    def scale(count: int) -> str:
        done = laminar("scale", "--rollouts", str(count), str(run))
        assert done.returncode == 0, done.stderr
        return done.stdout

    until(lambda: {"rollout-1.0", "rollout-2.0"} <= finished_by(run), "two machines have work done")
    scale(3)
    until(lambda: "rollout-3.0" in finished_by(run), "the third machine has work done")
    jobs = read_jobs(run)
    assert jobs is not None
    (array,) = jobs.rollouts
    assert f"ending {array}_3" in scale(2)
    until(lambda: f"{array}_3" not in lab.queue(), "it has left")
    before = steps(run)
    until(lambda: steps(run) > before + 3, "the others go on")
    assert "queued" in scale(3)
    until(lambda: "rollout-4.0" in finished_by(run), "another machine has work done")
    shown = laminar("ps", str(run)).stdout
    assert shown.count("RUNNING") == 4 and "rollout-4.0" in shown, shown
    stopped = laminar("stop", str(run))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: not lab.queue(), "the queue is empty")
    log = (run / "logs" / "slurm" / f"service-{jobs.service}.log").read_text()
    ended = Finished(run, 0, log)
    assert not ended.summary["failure"], log
    check_books(ended)
