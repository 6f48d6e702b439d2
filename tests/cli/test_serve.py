"""When a node that Slurm warns leaves: at once, or with the run, if the run pauses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from laminar.cli import serve
from laminar.cli.serve import NodeKeeper
from laminar.config import load_config
from laminar.launch.supervisor import StopRequest
from laminar.names import exit_codes
from laminar.run.directory import STATUS_FILE
from laminar.run.lock import RunLock


class PausingNode:
    """Ends by itself after some polls, as the run pauses, unless it is signalled before."""

    pid = 7

    def __init__(self) -> None:
        self.left, self.returncode = 5, cast(int | None, None)

    def poll(self) -> int | None:
        self.left -= 1
        if self.left < 0 and self.returncode is None:
            self.returncode = exit_codes.PAUSED
        return self.returncode

    def signal(self, pid: int, number: int) -> None:
        assert (pid, number) == (self.pid, signal.SIGTERM)
        self.returncode = exit_codes.COMPLETE


@pytest.mark.parametrize(
    ("name", "number", "pause", "code"),
    [
        ("trainer-node-1", signal.SIGUSR1, "pausing", exit_codes.PAUSED),
        ("trainer-node-1", signal.SIGUSR1, "", exit_codes.COMPLETE),
        ("trainer-node-1", signal.SIGTERM, "pausing", exit_codes.COMPLETE),
        ("node-1", signal.SIGUSR1, "pausing", exit_codes.COMPLETE),
    ],
)
def test_a_warned_trainer_node_stays_while_the_run_pauses(
    name: str,
    number: signal.Signals,
    pause: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step in training needs its ranks; a rollout machine is not needed."""
    node, said = PausingNode(), list[str]()
    monkeypatch.setattr(serve, "start_daemon", lambda *words: node)
    monkeypatch.setattr(serve, "POLL_S", 0.0)
    monkeypatch.setattr(serve, "STAY_S", 0.0)
    monkeypatch.setattr(os, "killpg", node.signal)
    (tmp_path / STATUS_FILE).write_text(json.dumps({"pause": pause}))
    asked = StopRequest()
    asked.raise_level(StopRequest.PAUSE, number.name)
    config = load_config([], ["model.name=m", "data.dataset=gcd", "trainer.nodes=2"])
    lock = RunLock.create(tmp_path, "serve")
    console: Any = type("Console", (), {"print_lines": lambda self, lines: said.extend(lines)})()
    assert NodeKeeper(config, lock, name, asked, console).run() == code
    assert said == [f"ending {name} ({number.name})"] * (code == exit_codes.COMPLETE)
    lock.close()
