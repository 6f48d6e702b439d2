"""The node that is started before a run: it becomes one of the run, or nothing is left of it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from laminar.actors.system.roles import Needs
from laminar.config import ConfigError, load_config
from laminar.launch import prefork as early_module
from laminar.launch.preflight import look_at_data
from laminar.launch.prefork import PreforkedNode
from laminar.names import exit_codes
from laminar.tasks.data.prompts import load_prompts

DEADLINE_S = 60.0
QUICKSTART = Path(__file__).parents[2] / "configs" / "recipes" / "words" / "run.toml"


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreforkedNode]:
    """Its warm process imports nothing, since that is not what is looked at here."""
    monkeypatch.setattr(
        early_module, "collect_needs", lambda *roles, **gpus: {"torch": Needs([], {})}
    )
    made = PreforkedNode(load_config([], ["model.name=m", "data.dataset=gcd"]), ["relay"])
    yield made
    made.close()


def warm_process(node: int) -> psutil.Process:
    """That of the node, once it has begun."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for child in psutil.Process(node).children():
            if child.name() == "laminar-warm":
                return child
        time.sleep(0.02)
    raise TimeoutError("no warm process")


def until_gone(process: psutil.Process) -> None:
    process.wait(DEADLINE_S)


def test_a_mistake_leaves_nothing_of_it(early: PreforkedNode) -> None:
    warm = warm_process(early._process.pid)
    early.close()
    assert early._process.returncode == -signal.SIGKILL
    until_gone(warm)


def test_it_ends_with_its_starter(early: PreforkedNode) -> None:
    """Which may be killed while it still checks."""
    warm = warm_process(early._process.pid)
    early._socket.close()
    assert early._process.wait(DEADLINE_S) == exit_codes.COMPLETE
    until_gone(warm)


def test_it_becomes_a_node_of_the_run_that_it_is_told(early: PreforkedNode, tmp_path: Path) -> None:
    """A mistake in the words is a sentence of laminar-node, as by its own command line."""
    with open(tmp_path / "run.lock", "w") as lock:
        process = early.start_node([str(tmp_path / "no-such-run")], lock.fileno())
        assert process.wait(DEADLINE_S) == exit_codes.USER_ERROR


@pytest.mark.parametrize("words", [[], ["data.dataset=nothing"], ["data.max_prompt_length=2"]])
def test_its_warm_process_makes_the_checks(
    early: PreforkedNode, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plan, or the sentence, of the same checks in this process."""
    config = load_config([QUICKSTART], ["data.dataset_size=200", *words])
    try:
        expected: object = look_at_data(config)
    except ConfigError as error:
        expected = str(error)
    monkeypatch.delattr(early_module, "look_at_data")
    try:
        found: object = early.look_at_data(config)
    except ConfigError as error:
        found = str(error)
    assert found == expected and isinstance(expected, str) == bool(words)


def test_the_checks_are_made_here_without_its_warm_process(
    early: PreforkedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_module, "look_at_data", lambda *arguments: arguments)
    warm_process(early._process.pid).kill()
    config = load_config([QUICKSTART], ["data.dataset_size=200"])
    assert early.look_at_data(config) == (config, load_prompts(config.data))
    monkeypatch.undo()
    emulated = load_config([], ["rollout.engine=emulated"])
    with contextlib.closing(PreforkedNode(emulated, ["store"])) as node:  # no process imports torch
        assert node.look_at_data(emulated) == look_at_data(emulated)
