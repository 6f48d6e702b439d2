"""A machine joins late, and then needs a version that only the first machine's relay has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from laminar.engines.emulated.timing import ResponseLengths
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId, trajectory_seed
from tests.run.conftest import ROOT, Finished, check_books, command, history
from tests.run.test_interruptions import end, status, until
from tools.bench.kills.lost_answers import lost_answers, read_log

pytestmark = [pytest.mark.process, pytest.mark.long]

LENGTHS = ResponseLengths(median=100, limit=3_000)
STEP_MS = 20
SIBLINGS, STEPS = 2, 4
LONG, HELD_OUT = GroupId("0.1"), GroupId("e0.0")
"""Its answer takes at least 40 s on version 0, while step 0 trains another group and makes 1; or
that to a held-out prompt does, while all steps are made."""
SETTINGS = [
    "rollout.engine=emulated",
    "rollout.replicas=1",
    f"rollout.group_size={SIBLINGS}",
    "rollout.max_num_seqs=8",
    "rollout.progress_interval_ms=100",
    "data.dataset_size=300",
    "data.val_size=0",
    "data.max_prompt_length=32",
    f"data.max_response_length={LENGTHS.limit}",
    "data.train_batch_size=1",
    "data.shuffle=false",
    "async.max_staleness=1",
    "trainer.test_freq=0",
    f"trainer.total_training_steps={STEPS}",
    f"emulation.median_response={LENGTHS.median}",
    f"emulation.step_us={1000 * STEP_MS}",
    "emulation.train_s=0.1",
    "emulation.weights_mb=16",
    "weights.rate_mbit=32",  # four seconds for a version
]


def _seed(long: str) -> int:
    """One with which this group has a long answer, and all others have short ones."""

    def longest(seed: int, group: str) -> int:
        siblings = range(1 if group == HELD_OUT else SIBLINGS)
        return max(
            LENGTHS.draw_length(trajectory_seed(seed, GroupId(group), s, 1)) for s in siblings
        )

    others = [f"0.{index}" for index in range(2 * STEPS) if f"0.{index}" != long]
    return next(
        seed
        for seed in count()
        if longest(seed, long) * STEP_MS >= 40_000
        and all(longest(seed, group) * STEP_MS <= 4_000 for group in others)
    )


class TwoMachines:
    """A run, and the `laminar-node` of its second machine."""

    def __init__(self, directory: Path, *settings: str, long: str = LONG) -> None:
        self.directory, self.run_dir = directory, directory / "run"
        place = [f"run.output_dir={directory}", "run.name=run", f"seed={_seed(long)}"]
        self.train = subprocess.Popen(
            command("train", *SETTINGS, *settings, *place),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.node: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """Start the second machine; its relay has what is newest from now on, and nothing older."""
        words = [str(self.run_dir), "--name", "node-1", "--roles", "relay,rollout:1"]
        self.node = subprocess.Popen([sys.executable, "-m", "laminar.cli.node", *words], cwd=ROOT)

    def replica(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = status(self.directory).get("replicas", {}).get(name, {})
        return {"version": -1, "running": 0, "waiting": 0, **found}

    def kill(self, name: str) -> int:
        """The process that was killed."""
        pid: int = status(self.directory)["processes"][name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def end(self) -> Finished:
        return end(self.train, self.directory)

    def close(self) -> None:
        for process in (self.train, self.node):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(30)


@pytest.fixture
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwoMachines]:
    """Version 0 is used on the first machine only, whose replica is killed; the other one waits."""
    run = TwoMachines(tmp_path, *getattr(request, "param", ()))
    try:
        until(lambda: status(tmp_path).get("newest_version", -1) >= 1, "a second version")
        run.join()
        until(lambda: _waits(run.replica("rollout-1.0")), "rollout-1.0 has nothing to do")
        long = run.replica("rollout-0")
        assert long["version"] == 0 and long["running"], f"the long answer has ended: {long}"
        yield run
    finally:
        run.close()


def _waits(replica: dict[str, Any]) -> bool:
    """It has newer weights, and its group was generated: now the long answer is waited for."""
    return bool(replica["version"] >= 1 and not replica["running"] and not replica["waiting"])


def _pulls(run_dir: Path) -> list[cmd.PullWeights]:
    """Orders to load what another machine has."""
    return [c for c in history(run_dir) if isinstance(c, cmd.PullWeights) and c.holder]


def test_lost_work_goes_on_with_a_version_of_another_machine(machines: TwoMachines) -> None:
    pid = machines.kill("rollout-0")
    run = machines.end()
    assert run.code == 0, run.output
    [pull] = _pulls(run.directory)
    assert (pull.to, pull.version, pull.holder) == ("rollout-1.0", 0, "relay-0")
    lost = lost_answers(run.directory, read_log(run.directory), "rollout-0", pid)
    assert lost["lost"] == lost["went_on"] == 1 and not lost["started_over"], lost
    assert run.summary["tokens_restarted"] == 0
    assert run.summary["steps"] == STEPS and not run.summary["groups_dropped"]
    check_books(run)


@pytest.mark.parametrize("machines", [["recovery.resume_timeout_ms=1000"]], indirect=True)
def test_source_is_killed_while_its_version_comes(machines: TwoMachines) -> None:
    """Its relay comes back with the newest version only: the work begins again, and ends."""
    machines.kill("rollout-0")
    until(lambda: bool(_pulls(machines.run_dir)), "a version is fetched")
    machines.kill("relay-0")
    run = machines.end()
    assert run.code == 0, run.output
    gone = [e for e in history(run.directory) if isinstance(e, ev.VersionMissing)]
    assert [e.version for e in gone] == [0]
    assert run.summary["steps"] == STEPS and run.summary["trajectories_trained"] == SIBLINGS * STEPS
    check_books(run)


def test_evaluation_goes_on_with_a_version_of_another_machine(tmp_path: Path) -> None:
    """The replica with its long answer is killed when the other one has nothing more to do."""
    one = ["data.val_size=1", "trainer.val_before_train=true"]
    machines = TwoMachines(tmp_path, *one, long=HELD_OUT)
    try:
        until(lambda: status(tmp_path).get("newest_version", -1) >= 1, "a second version")
        machines.join()
        until(lambda: status(tmp_path).get("newest_version", -1) >= STEPS, "all steps")
        until(lambda: _waits(machines.replica("rollout-1.0")), "rollout-1.0 has nothing to do")
        assert machines.replica("rollout-0")["running"], "the long answer has ended"
        machines.kill("rollout-0")
        run = machines.end()
    finally:
        machines.close()
    assert run.code == 0, run.output
    [pull] = _pulls(run.directory)
    assert (pull.to, pull.version, pull.holder) == ("rollout-1.0", 0, "relay-0")
    answers = [c for c in history(run.directory) if isinstance(c, cmd.GenerateTrajectory)]
    again = [(c.group, c.version) for c in answers if c.group.startswith("e0") and c.attempt > 1]
    assert again == [("e0.0-2", 0)]
    check_books(run)
