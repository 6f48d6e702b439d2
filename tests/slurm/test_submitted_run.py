"""A run on a Slurm: queued by one command, it outlives the power failure of a machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from laminar.cluster.slurm import read_jobs
from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.codec import decode_event
from tests.run.conftest import ROOT, SMALL, Finished, arenas, check_books, laminar
from tests.slurm.conftest import NODES, Lab, until

pytestmark = [pytest.mark.slurm, pytest.mark.process]
SUBMIT = ["submit", "-c", f"{ROOT}/configs/recipes/words/run.toml", *SMALL, "rollout.replicas=1"]
MACHINES = ["slurm.rollouts=2", "slurm.spares=1"]
SPARE = 3  #: what the task has that waits for the place of another one
STEPS = 6


def finished_by(run: Path) -> set[str]:
    """The replicas that have finished a response."""
    if not (run / "events").is_dir():
        return set()
    return {
        record.peer
        for _, record in read_log(RealDisk(run / "events"))
        if isinstance(record, EventRecord)
        and isinstance(decode_event(record.event), ev.TrajectoryFinished)
    }


def steps(run: Path) -> int:
    try:
        return int(json.loads((run / "status.json").read_text())["step"])
    except (FileNotFoundError, ValueError):
        return 0


def test_a_spare_takes_the_place_of_a_machine_that_loses_power(lab: Lab) -> None:
    """The run trains as long as that takes, six steps at least, and is then asked to end."""
    place = [f"run.output_dir={lab.runs}", "run.name=power", "trainer.total_training_steps=500"]
    submitted = laminar(*SUBMIT, *MACHINES, *place)
    assert submitted.returncode == 0, submitted.stderr
    run = lab.runs / "power"
    jobs = read_jobs(run)
    assert jobs is not None
    first = f"{jobs.rollouts[0]}_1"
    until(lambda: "rollout-1.0" in finished_by(run), "the first rollout machine has work done")
    lab.node("kill-node", lab.queue()[first][1])
    until(lambda: f"rollout-{SPARE}.0" in finished_by(run), "the spare has work done")
    until(lambda: steps(run) >= STEPS, f"step {STEPS}")
    stopped = laminar("stop", str(run))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: not lab.queue(), "the queue is empty")
    log = (run / "logs" / "slurm" / f"service-{jobs.service}.log").read_text()
    ended = Finished(run, 0, log)
    assert ended.summary["steps"] >= STEPS and not ended.summary["failure"], log
    check_books(ended)
    again = laminar("retrain", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
    assert arenas(run, NODES) == []
    for node in ("n1", "n2", "n3", "n4"):
        lab.node("start-node", node)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("slurm.partition=nowhere", "Invalid partition name"),
        ("slurm.gpus=9", "node configuration is not available"),
        ("slurm.mem=900G", "node configuration is not available"),
        ("slurm.extra=[--nonsense]", "unrecognized option '--nonsense'"),
    ],
)
def test_what_slurm_refuses_is_one_sentence_and_leaves_nothing(
    lab: Lab, setting: str, said: str
) -> None:
    refused = laminar(*SUBMIT, *MACHINES, setting, f"run.output_dir={lab.runs}", "run.name=refused")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and said in refused.stderr
    assert not (lab.runs / "refused").exists() and not lab.queue()


def test_without_a_controller_nothing_is_left(lab: Lab, tmp_path: Path) -> None:
    """As on a login node while slurmctld is away: its commands say so."""
    pid = int((lab.directory / "run" / "slurmctld").read_text())
    subprocess.run(["kill", "-STOP", str(pid)], check=True)
    try:
        refused = laminar(*SUBMIT, f"run.output_dir={lab.runs}", "run.name=alone")
    finally:
        subprocess.run(["kill", "-CONT", str(pid)], check=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert not (lab.runs / "alone").exists()
    until(lambda: not lab.queue(), "the queue is empty")
