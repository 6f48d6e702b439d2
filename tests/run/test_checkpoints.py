"""Checkpoints of a real run: models that load, and the way back to a version that is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.weights.version import checkpoint
from tests.run.conftest import Finished, check_books, history
from tests.run.test_interruptions import end, start, status, until

pytestmark = [pytest.mark.process, pytest.mark.long]
STEPS = 20
RELAY = "relay-0"
STOPS_MAX = 5


def step_of(directory: Path) -> int:
    return int(status(directory)["step"])


def stop_at_work(directory: Path, replica: str) -> int:
    """The pid of the replica, which stands still with trajectories running.

    Between two pulls it has none that could be lost, and what it had said before it stood still
    is known a whole step later: a moment that was no good is let go, and the next one tried.
    """
    victim: int = status(directory)["processes"][replica]
    for _ in range(STOPS_MAX):
        stopped_at = step_of(directory)
        os.kill(victim, signal.SIGSTOP)
        until(lambda at=stopped_at: step_of(directory) > at + 1, "a whole step after the stop")
        if status(directory)["replicas"][replica]["running"]:
            return victim
        os.kill(victim, signal.SIGCONT)
        until(lambda: status(directory)["replicas"][replica]["running"] > 0, f"{replica} works")
    raise AssertionError(f"{replica} had no work at any of {STOPS_MAX} stops")


def test_lost_work_goes_on_with_a_version_that_only_the_disk_has(tmp_path: Path) -> None:
    """A replica stands still while the run goes on without it. The relay, which keeps the version
    of unfinished work as long as it can, is killed and comes back with newer ones. Then the replica
    dies: its trajectories go on with the weights of the checkpoint."""
    process = start(
        tmp_path,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=0",  # all
        "async.max_staleness=8",
        "rollout.groups_per_version=4",
        "recovery.resume_timeout_ms=60000",
        "coordinator.lease_ms=60000",
        "coordinator.node_lease_ms=60000",
    )
    until(lambda: step_of(tmp_path) >= 2, "step 2")
    victim = stop_at_work(tmp_path, "rollout-1")
    os.kill(status(tmp_path)["processes"][RELAY], signal.SIGKILL)
    stopped_at = step_of(tmp_path)
    until(lambda: step_of(tmp_path) >= stopped_at + 3, "three more steps")
    os.kill(victim, signal.SIGKILL)
    run = end(process, tmp_path)
    assert run.code == 0, run.output
    assert f"checkpoints      {STEPS} in {run.directory / 'checkpoints'}" in run.output
    _check(run)


def _check(run: Finished) -> None:
    published: dict[int, str] = {}
    wanted: list[cmd.PullWeights] = []
    loaded: list[tuple[int, str]] = []
    for item in history(run.directory):
        if isinstance(item, ev.WeightsPublished):
            published[item.version] = item.digest
        elif isinstance(item, cmd.PullWeights) and item.checkpoint:
            wanted.append(item)
        elif isinstance(item, ev.WeightsLoaded):
            loaded.append((item.version, item.digest))
    assert wanted and {order.purpose for order in wanted} == {"resume"}
    assert all((order.version, published[order.version]) in loaded for order in wanted)
    for order in wanted:
        manifest = checkpoint.read_version(run.directory / order.checkpoint, order.version).manifest
        assert manifest.digest == published[order.version]
    check_books(run)
