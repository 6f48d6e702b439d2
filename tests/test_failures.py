"""docs/failures.md: what it says of each role is so in the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from laminar.config import Config
from laminar.coordinator.detector import FailureDetector
from laminar.core.state.statuses import Phase
from laminar.names.roles import ACTOR_ROLES, Role
from tools.kit.bench import Bench

TEXT = (Path(__file__).parents[1] / "docs" / "failures.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ")
][1:]
BY_ROLE = {row[0]: row for row in ROWS}
NO_ROLES = ("rank of the trainer", "reward worker", "warm process", "`laminar train`")
LEASES = ("coordinator.lease_ms", "coordinator.node_lease_ms")
ENDS, FIRST, OTHERS = (
    "ends",
    "ends with the machine of store and trainer, else continues",
    "continues",
)


def test_every_role_has_a_row_of_six() -> None:
    assert list(BY_ROLE) == [*map(str, Role), *NO_ROLES]
    assert {len(row) for row in ROWS} == {6} and all(all(row) for row in ROWS)


def value_of(name: str) -> Any:
    """Of a setting, or of a constant by its module."""
    section, _, key = name.rpartition(".")
    if section in Config.__struct_fields__:
        return getattr(getattr(Config(), section), key)
    return getattr(importlib.import_module(f"laminar.{section}"), key)


def test_settings_and_constants_have_the_values_that_stand_beside_them() -> None:
    named = re.findall(r"`([\w.]+\.\w+)`(?:\s+\((\d+)\))?", TEXT)
    assert len(named) > 30
    assert [(name, n) for name, n in named if n and value_of(name) != float(n)] == []
    settings = [name for name, _ in named if not name.endswith((".md", ".py"))]
    assert all(value_of(name) is not None for name in settings)


@pytest.mark.parametrize("role", ACTOR_ROLES)
def test_each_names_the_silence_that_it_may_keep(role: Role) -> None:
    lease = LEASES[FailureDetector(1, 2, 0).get_lease_ns(role) - 1]
    others = set(LEASES) - {lease}
    assert f"`{lease}`" in BY_ROLE[role][1] and not any(
        f"`{o}`" in BY_ROLE[role][1] for o in others
    )


def ends(name: str, *, machines: int = 2, save_freq: int = 20) -> bool:
    """Whether the run ends, or has failed, when this process is lost and does not come back."""
    bench = Bench(nodes=machines, max_staleness=1, save_freq=save_freq)
    bench.start()
    if name.startswith("node-"):
        bench.silent(name)
    else:
        bench.kill(name)
    assert bench.state.run.phase == (Phase.RUNNING if save_freq else Phase.ENDING)
    bench.wait(bench.settings.start_timeout_ms + 1)
    return bench.state.run.phase != Phase.RUNNING


@pytest.mark.parametrize("role", ACTOR_ROLES)
def test_what_becomes_of_the_run_is_what_the_core_decides(role: Role) -> None:
    """Lost on the first machine, on another one, and where there is no other."""
    first, other = f"{role}-0", f"{role}-1.0" if role == Role.ROLLOUT else f"{role}-1"
    if role in (Role.STORE, Role.TRAINER):
        assert (ends(first), BY_ROLE[role][5]) == (True, ENDS)
    elif role == Role.ROLLOUT:
        assert not ends(first) and not ends(other) and ends(first, machines=1)
        assert BY_ROLE[role][5] == f"{OTHERS}, unless it was the last"
    else:
        assert (ends(first), ends(other), BY_ROLE[role][5]) == (True, False, FIRST)


def test_a_trainer_without_checkpoints_ends_the_run_at_once() -> None:
    assert "unless `trainer.save_freq` (20) is 0" in BY_ROLE[Role.TRAINER][2]
    assert ends("trainer-0", save_freq=0)


def test_a_batch_and_a_prompt_that_end_processes_are_given_up() -> None:
    """The numbers are those that the core counts to."""
    assert "`core.steps.step_replay.DEATHS_MAX` (3)" in BY_ROLE[Role.TRAINER][4]
    bench = Bench(save_freq=20)
    bench.start()
    bench.complete("0.0", "0.1")
    for death in range(1, value_of("core.steps.step_replay.DEATHS_MAX") + 1):
        assert bench.state.run.phase == Phase.RUNNING, death
        bench.kill("trainer-0")
        bench.come_back("trainer-0", boot=f"again-{death}")
    assert bench.state.run.phase == Phase.ENDING
