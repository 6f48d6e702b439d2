"""Losses in every way that there is, and a targeted fault whose moment comes in every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.kit.sim_worlds import calm, config
from tools.simulator.config import FAULTS, Choices, load
from tools.simulator.faults.faults import FATAL_ROLES, KINDS
from tools.simulator.faults.targeted import LAST_WORDS, WAYS, lose
from tools.simulator.run import make_world, run_seed

ROOT = Path(__file__).parents[2]


def test_a_trainer_goes_on_from_the_checkpoint_before_a_damaged_one() -> None:
    """It sets the damaged one aside, and does again what the one before it does not have."""
    saves = {"save_freq": 1, "max_ckpt_to_keep": 2, "total_training_steps": 6}
    outcome = run_seed(config("newest-checkpoint-damaged", **saves), 1)
    assert not outcome.invariant, outcome.details
    assert outcome.coverage["fault:newest-checkpoint-damaged"] == 1
    assert not outcome.failure and outcome.coverage["event:StepRepeated"] > 0


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("source-lost-in-fetch", 1),
        pytest.param("version-elsewhere", 3, marks=pytest.mark.long),
        pytest.param("fetched-twice", 1, marks=pytest.mark.long),
        pytest.param("checkpoint-gone-in-fetch", 1, marks=pytest.mark.long),
        pytest.param("evaluation-elsewhere", 51, marks=pytest.mark.long),
    ],
)
def test_version_of_another_machine_and_what_goes_wrong_with_it(kind: str, seed: int) -> None:
    outcome = run_seed(_sources(kind), seed)
    assert not outcome.invariant, outcome.details
    assert outcome.coverage[f"fault:{kind}"] == 1 and not outcome.failure


def _sources(kind: str) -> Choices:
    """The worlds of lost work that needs such versions, with no other fault."""
    alone = {"menu": [kind], "share": 1.0, "fatal_share": 0.0, "calm_share": 0.0}
    swarm = load(ROOT / "configs" / "sim_sources.toml", KINDS)
    return swarm | {FAULTS + key: value for key, value in alone.items()}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_lose_a_replica(way: str) -> None:
    """The coordinator hears of it as of such a loss, and somebody of that name comes back."""
    with make_world(calm(replicas=4, total_training_steps=0, num_train=100), 1) as world:
        world.begin()
        victim = world.rollouts[0]
        while not victim.welcomed:
            world.scheduler.step()
        boot = victim.boot_id
        lose(world.faults, victim, way)
        assert victim.paused == (way == "silent")
        while not world.finished:
            world.scheduler.step()
        news = {"leaves": "ActorLeft", "complains": "ActorFailed", "silent": "HeartbeatLost"}
        assert world.coverage.counts[f"event:{news.get(way, 'ProcessExited')}"] > 0
        assert set(LAST_WORDS) < set(WAYS)
        assert victim.boot_id != boot


def test_who_is_gone_is_not_lost_again() -> None:
    with make_world(calm(replicas=4), 1) as world:
        lose(world.faults, world.rollouts[0], "replaced")
        assert not world.rollouts[0].alive


LOSSES = [(role, way) for role in FATAL_ROLES for way in WAYS]
NEW_ONE_WILL_DO = [(role, "replaced") for role in ("node", "relay")]


def _losses() -> list[Any]:
    """Every way for one role, and every role in one way; each with each takes long."""
    return [
        pytest.param(
            role, way, marks=() if role == "trainer" or way == "dies" else pytest.mark.long
        )
        for role, way in LOSSES
        if (role, way) not in NEW_ONE_WILL_DO
    ]


@pytest.mark.parametrize(("role", "way"), _losses())
def test_what_a_run_needs_is_lost_in_every_way(role: str, way: str) -> None:
    """The run ends with a reason, whatever the way."""
    fatal = config("hangs", replicas=4, total_training_steps=0, num_train=400, seconds=60.0)
    with make_world(fatal, 1) as world:
        world.faults.rates["hangs"] = 0.0
        world.faults.fatal_role, world.faults.fatal_way = role, way
        world.run()
        state = world.coordinator.state
        assert world.coverage.counts[f"fault:lost-{role}"] == 1
        assert state is not None and state.run.failed is not None
        assert state.run.failed.subject in [process.name for process in world.faults.doomed()]
