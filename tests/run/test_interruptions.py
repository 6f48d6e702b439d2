"""A run that is interfered with: the coordinator killed, replicas ended, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.run.lock import holders
from tests.run.conftest import ROOT, Finished, arenas, check_books, command, history, laminar

pytestmark = pytest.mark.process
WAIT_S = 120


def arguments(directory: Path) -> list[str]:
    return [
        "-c",
        "configs/recipes/words/run.toml",
        "data.dataset_size=2000",
        "data.val_size=16",
        "trainer.test_freq=0",
        f"run.output_dir={directory}",
        "run.name=run",
    ]


def start(directory: Path, *further: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`within`: a command that runs the one appended to it, in an environment of its choice."""
    return subprocess.Popen(
        [*within, *command("train", *arguments(directory), *further)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def status(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / "run" / "status.json").read_text())
    except FileNotFoundError:
        return {"step": -1, "phase": "", "processes": {}}
    return found


def until(what: Callable[[], bool], said: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s until {said}"
        time.sleep(0.05)


def end(process: subprocess.Popen[str], directory: Path) -> Finished:
    output, _ = process.communicate(timeout=WAIT_S)
    return Finished(directory / "run", process.returncode, output)


def coordinator_pid(directory: Path) -> int:
    found = subprocess.run(
        ["pgrep", "-f", f"laminar.cli.coord {directory / 'run'}"], capture_output=True, text=True
    )
    return int(found.stdout.split()[0])


@pytest.mark.long
def test_the_coordinator_is_killed_three_times(tmp_path: Path) -> None:
    """Nobody else notices: no pid changes, tokens and a step in the gap, three books agree."""
    process = start(
        tmp_path,
        "trainer.total_training_steps=10",
        "recovery.coordinator_restart_ms=5000",
        "async.max_staleness=6",  # or the replicas may just be waiting for the trainer
    )
    gaps, ports = [], set()
    until(lambda: _samples(tmp_path), "a replica with work")
    replicas = [p for name, p in status(tmp_path)["processes"].items() if "rollout" in name]
    for at_step in (0, 4, 7):
        until(lambda at=at_step: status(tmp_path)["step"] >= at, f"step {at_step}")
        if at_step:
            until(lambda: status(tmp_path)["trainer"] == "training", "the trainer has a batch")
        ports.add(json.loads((tmp_path / "run" / "coordinator.json").read_text())["address"])
        others = dict(status(tmp_path)["processes"])
        if at_step == 0:
            _fill_while_they_stand_still(replicas)
        killed_at = time.time_ns()
        os.kill(coordinator_pid(tmp_path), signal.SIGKILL)
        for pid in replicas:
            os.kill(pid, signal.SIGCONT)
        time.sleep(5)
        gaps.append((killed_at, time.time_ns()))
    run = end(process, tmp_path)
    assert run.code == 0, run.output
    assert len(ports) == 1
    after = run.summary["processes"]
    assert {name: after[name] for name in others} == others
    assert run.summary["coordinator_incarnations"] == 4
    _work_went_on(run.directory, gaps)
    check_books(run)


def _fill_while_they_stand_still(replicas: list[int]) -> None:
    """They do their work after the kill then. A fast machine finishes it in less than the time
    between two looks at the status, so a kill without this can meet idle replicas."""
    for pid in replicas:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)


def _samples(directory: Path) -> bool:
    """Some replica generates."""
    return any(replica["running"] for replica in status(directory).get("replicas", {}).values())


def _work_went_on(run: Path, gaps: list[tuple[int, int]]) -> None:
    """In some gap tokens were sampled, in some gap the trainer finished a step."""
    steps = np.concatenate(
        [np.fromfile(f, dtype="<i8").reshape(-1, 4) for f in (run / "timeline").glob("*.steps")]
    )
    lines = (run / "timeline" / "trainer-0.jsonl").read_text().splitlines()
    trained = [s["end_ns"] for s in map(json.loads, lines) if s["state"] == "busy"]
    assert any(((steps[:, 1] > a) & (steps[:, 1] < b)).any() for a, b in gaps)
    assert any(a < end_ns < b for end_ns in trained for a, b in gaps)


@pytest.mark.long
def test_replicas_the_store_and_their_node_are_ended(tmp_path: Path) -> None:
    """Their node starts them again: replicas whatever ended them, their trajectories are finished
    elsewhere; the store when it was killed. The node is started again by `laminar train`, and
    starts all of them anew. The books agree."""
    process = start(tmp_path, "trainer.total_training_steps=9", "recovery.resume_timeout_ms=1000")
    until(lambda: status(tmp_path)["step"] >= 2, "step 2")
    ends = {
        "rollout-1": -signal.SIGKILL,
        "rollout-0": exit_codes.TERMINATED,
        "store-0": -signal.SIGKILL,
    }
    os.kill(status(tmp_path)["processes"]["rollout-1"], signal.SIGKILL)
    time.sleep(2)
    os.kill(status(tmp_path)["processes"]["rollout-0"], signal.SIGTERM)
    until(lambda: status(tmp_path)["step"] >= 4, "step 4")
    os.kill(status(tmp_path)["processes"]["store-0"], signal.SIGKILL)
    until(lambda: status(tmp_path)["step"] >= 6, "step 6")
    _kill_the_node(tmp_path)
    run = end(process, tmp_path)
    assert run.code == 0, run.output
    _all_came_back(run)
    exits = [e for e in history(run.directory) if isinstance(e, ev.ProcessExited)]
    assert {e.actor: e.code for e in exits if e.restarting} == ends
    check_books(run)


def _kill_the_node(directory: Path) -> None:
    """Its processes die with it at once, also one that stands still."""
    pids = {holder.name: holder.pid for holder in holders(directory / "run")}
    children = {pids[name] for name in status(directory)["processes"] if name != "node-0"}
    os.kill(pids["rollout-1"], signal.SIGSTOP)
    os.kill(pids["node-0"], signal.SIGKILL)
    until(
        lambda: not children & {holder.pid for holder in holders(directory / "run")},
        "the processes of the node have ended",
    )


def _all_came_back(run: Finished) -> None:
    """Each process names the present boot of its node, which counts what it starts, and what was
    trained is trained again."""
    joins = [e for e in history(run.directory) if isinstance(e, ev.ActorJoined)]
    starts = [(e.node_boot, e.name, e.start) for e in joins if e.node_boot]
    assert len({*starts}) == len(starts) and {start for *_, start in starts} == {1, 2}
    joined = {e.name: e for e in joins}
    node = joined.pop("node-0")
    assert {e.node_boot for e in joined.values()} == {node.boot_id}
    assert {*joined} == {"store-0", "trainer-0", "relay-0", "rollout-0", "rollout-1"}
    repeated = [e for e in history(run.directory) if isinstance(e, ev.StepRepeated)]
    assert repeated and all(e.digest == e.published for e in repeated if e.published)
    assert "node-0 ended with exit code -9, and its processes with it" in run.output


@pytest.mark.parametrize("engine", ["emulated", pytest.param("torch", marks=pytest.mark.long)])
def test_ctrl_c_drains_and_leaves_a_usable_run(tmp_path: Path, engine: str) -> None:
    """While it lives nobody moves its directory away; then nothing is left of its processes."""
    words = ["trainer.total_training_steps=500", "data.train_batch_size=4"]
    process = start(tmp_path, *words, f"rollout.engine={engine}", "emulation.train_s=0.5")
    until(lambda: status(tmp_path)["step"] >= 2, "step 2")
    living = {holder.name: holder.pid for holder in holders(tmp_path / "run")}
    again = laminar("train", *arguments(tmp_path), "--move-old")
    assert again.returncode == exit_codes.USER_ERROR, again.stdout + again.stderr
    assert all(f"{name} (pid {pid})" in again.stderr for name, pid in living.items())
    assert living.keys() >= {"train", "coordinator", "node-0", *status(tmp_path)["processes"]}
    process.send_signal(signal.SIGINT)
    run = end(process, tmp_path)
    assert holders(run.directory) == [] and arenas(run.directory) == []
    assert run.code == 0, run.output
    assert run.summary["interrupted"] is True
    assert f"train --resume {run.directory}" in run.output
    exported = "model.safetensors" if engine == "torch" else "emulated_weights.bin"
    assert (run.directory / "export" / exported).is_file()
    done = laminar("audit", str(run.directory))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_nothing_outlives_a_supervisor_and_a_coordinator_that_are_killed(tmp_path: Path) -> None:
    """Nobody would start another coordinator: the node gives up, and its actors go with it."""
    process = start(tmp_path, "trainer.total_training_steps=500", "data.train_batch_size=4")
    until(lambda: status(tmp_path)["step"] >= 1, "step 1")
    living = {holder.name: holder.pid for holder in holders(tmp_path / "run")}
    for name in ("train", "coordinator"):
        os.kill(living[name], signal.SIGKILL)
    until(lambda: holders(tmp_path / "run") == [], "all processes have ended")
    run = end(process, tmp_path)
    assert run.code == -signal.SIGKILL
    assert arenas(run.directory) == []
    log = (run.directory / "logs" / "latest" / "node-0.jsonl").read_text().splitlines()
    reasons = [line["reason"] for line in map(json.loads, log) if line["event"] == "failed"]
    assert len(reasons) == 1 and reasons[0].startswith("the coordinator was silent for")
