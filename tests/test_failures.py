"""docs/failures.md: what it says of each role is so in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laminar.core.state.statuses import Phase
from laminar.names.roles import ACTOR_ROLES, ROLE_TABLE, Loss, Place, Role
from tools.kit.bench import start_bench
from tools.make.failures import page, read_value

TEXT = (Path(__file__).parents[1] / "docs" / "failures.md").read_text()


def test_the_table_is_current() -> None:
    assert page() == TEXT, "run python -m tools.make.failures"


def test_settings_and_constants_have_the_values_that_stand_beside_them() -> None:
    named = re.findall(r"`([\w.]+\.\w+)`(?:\s+\((\d+)\))?", TEXT)
    assert len(named) > 30
    assert [(name, n) for name, n in named if n and read_value(name) != float(n)] == []
    settings = [name for name, _ in named if not name.endswith((".md", ".py"))]
    assert all(read_value(name) is not None for name in settings)


def ends(name: str, *, machines: int = 2, save_freq: int = 20) -> bool:
    """Whether the run ends, or has failed, when this process is lost and does not come back."""
    sessions = {"max_sessions": 99} if name.startswith(Role.AGENT) else {}
    bench = start_bench(sessions, nodes=machines, max_staleness=1, save_freq=save_freq)
    if name.startswith(Role.RANKS):
        bench.join(name)
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
    loss = ROLE_TABLE[role].loss
    assert ends(first) == (loss in (Loss.ENDS, Loss.ENDS_WITH_FIRST))
    if ROLE_TABLE[role].place != Place.FIRST:
        assert not ends(other)
    if loss == Loss.ENDS_WITH_LAST:
        assert ends(first, machines=1)


def test_a_trainer_without_checkpoints_ends_the_run_at_once() -> None:
    assert ends("trainer-0", save_freq=0)


def test_a_batch_and_a_prompt_that_end_processes_are_given_up() -> None:
    bench = start_bench(save_freq=20)
    bench.complete("0.0", "0.1")
    for death in range(1, read_value("core.steps.step_replay.DEATHS_MAX") + 1):
        assert bench.state.run.phase == Phase.RUNNING, death
        bench.kill("trainer-0")
        bench.come_back("trainer-0", boot=f"again-{death}")
    assert bench.state.run.phase == Phase.ENDING
