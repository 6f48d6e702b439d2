"""The nodes of `laminar train`: which are started again, when, and what is said of it."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest

from laminar.config import load_config
from laminar.launch.node_restarts import NodeRestarter, Process
from laminar.names import exit_codes


class FakeNode:
    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class Run:
    """Two machines; `nodes` are all processes that there have been."""

    def __init__(self, *settings: str) -> None:
        config = load_config([], ["model.name=m", "data.dataset=gcd", "run.nodes=2", *settings])
        self.nodes: list[FakeNode] = []
        self.started: list[str] = []
        self.notes: list[str] = []
        self.machines = NodeRestarter(config, ["node-0", "node-1"], self._start, self.notes.append)
        self.machines.start_all(self._start)

    def _start(self, name: str) -> Process:
        self.nodes.append(FakeNode())
        self.started.append(name)
        return cast(Any, self.nodes[-1])


def test_a_node_that_dies_is_started_again_after_longer_and_longer_pauses() -> None:
    run = Run("recovery.max_restarts=2")
    run.machines.restart_ended(0.0)
    assert run.started == ["node-0", "node-1"]
    for at_s, since_s in ((10.0, 10.0), (20.0, 21.0)):
        run.nodes[-1].code = -signal.SIGKILL
        run.machines.restart_ended(at_s)
        run.machines.restart_ended(since_s - 0.01)
        run.machines.restart_ended(since_s)
    assert run.started == ["node-0", *["node-1"] * 3]
    assert dict(run.machines) == {"node-0": run.nodes[0], "node-1": run.nodes[-1]}
    run.nodes[-1].code = exit_codes.FAILED
    for at_s in (30.0, 300.0):
        run.machines.restart_ended(at_s)
    assert run.started == ["node-0", *["node-1"] * 3]
    assert run.notes == [
        "node-1 ended with exit code -9, and its processes with it; restarting it",
        "node-1 ended with exit code -9, and its processes with it; restarting it in 1 s",
        "node-1 ended with exit code 1; it was restarted 2 times within 3600 s, and "
        "recovery.max_restarts is 2",
    ]


@pytest.mark.parametrize(
    "code", [exit_codes.COMPLETE, exit_codes.USER_ERROR, exit_codes.TERMINATED]
)
def test_a_node_that_was_to_end_is_not_started_again(code: int) -> None:
    run = Run()
    run.nodes[0].code = code
    for at_s in (0.0, 100.0):
        run.machines.restart_ended(at_s)
    assert (run.started, run.notes) == (["node-0", "node-1"], [])


def test_a_node_that_the_coordinator_does_not_take_waits_a_little() -> None:
    """Its machine had been given up, and it comes back; or the run ends just now."""
    run = Run()
    run.nodes[0].code = exit_codes.COORDINATOR_ABSENT
    run.machines.restart_ended(5.0)
    run.machines.restart_ended(5.9)
    assert run.started == ["node-0", "node-1"]
    run.machines.restart_ended(6.0)
    assert run.started == ["node-0", "node-1", "node-0"]
