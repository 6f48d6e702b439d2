"""When a node that Slurm warns leaves: at once, or with the run, if the run pauses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.cli import serve
from laminar.config import load_config
from laminar.launch.supervisor import StopRequest
from laminar.launch.terminal import Terminal
from laminar.run.directory import STATUS_FILE
from laminar.run.lock import RunLock


@pytest.mark.parametrize(
    ("name", "signal", "pause", "stays"),
    [
        ("trainer-node-1", "SIGUSR1", "pausing", True),
        ("trainer-node-1", "SIGUSR1", "", False),
        ("trainer-node-1", "SIGTERM", "pausing", False),
        ("node-1", "SIGUSR1", "pausing", False),
    ],
)
def test_a_warned_trainer_node_stays_while_the_run_pauses(
    name: str, signal: str, pause: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in training needs its ranks; a rollout machine is not needed."""
    monkeypatch.setattr(serve, "STAY_S", 0.0)
    (tmp_path / STATUS_FILE).write_text(json.dumps({"pause": pause}))
    asked, lock = StopRequest(), RunLock.create(tmp_path, "serve")
    asked.raise_level(StopRequest.PAUSE, signal)
    config = load_config([], ["model.name=m", "data.dataset=gcd", "trainer.nodes=2"])
    keeper = serve.NodeKeeper(config, lock, name, asked, Terminal(plain=True))
    assert keeper._is_needed() == stays
    lock.close()
