"""Targeted faults: each finds its moment, leads to what it is meant for, and breaks no promise."""

from __future__ import annotations

import warnings

import pytest

from laminar.sim.faults.faults import FATAL_ROLES
from laminar.sim.faults.targeted import LAST_WORDS, WAYS, TargetedFault, lose
from laminar.sim.faults.targeted_faults import TARGETED
from laminar.sim.run import run_seed
from laminar.sim.world import World
from tests.kit.sim_worlds import PACKED, calm, config

MOMENTS = (
    ("last-answer-lost", 22, "ActorJoined -> TrainStep"),
    ("last-answer-lost", 20, "ActorFailed -> PinVersion"),
    ("last-answer-lost", 32, "TrajectoryFailed -> TrainStep"),
    ("relay-lost-publishing", 55, "ActorLeft -> ProposeBatch"),
    ("relay-lost-publishing", 56, "HeartbeatLost -> TrainStep"),
    ("relay-lost-publishing", 67, "ActorFailed -> ExportModel"),
    ("relay-lost-in-transfer", 8, "ActorLeft -> ForwardWeights"),
    ("relay-holds-up-transfers", 5, "WeightsReceived -> ForwardWeights"),
    ("transfer-never-ends", 9, "TimerFired -> RestartActor"),
    ("drain-in-phase", 36, "WeightsPublished -> AbortTrajectories"),
    ("drain-in-phase", 4, "StepCompleted -> PullWeights"),
    ("publish-differs", 21, "WeightsPublished -> RestartActor"),
    ("publish-differs", 35, "WeightsReceived -> RestartActor"),
    ("pin-late", 7, "RelayReady -> PinVersion"),
    ("pin-late", 5, "VersionGone -> PinVersion"),
    ("evaluation-out-of-reach", 42, "WeightsReceived -> PinVersion"),
    ("evaluation-out-of-reach", 31, "ReplicaReady -> EndTrajectories"),
    ("evicted-version-lost", 134, "CheckpointRefused -> GenerateTrajectory"),
    ("evicted-version-lost", 5, "CheckpointRefused -> PullWeights"),
    ("checkpoint-outdated", 12, "CheckpointSaved -> GenerateTrajectory"),
    ("evaluation-stalls", 5, "CheckpointRefused -> PinVersion"),
    ("lost-in-hand-over", 19, "TrajectoriesReleased -> AbortTrajectories"),
    ("lost-in-hand-over", 32, "ignored:late"),
    ("only-one-of-its-version-lost", 62, "ActorFailed -> PullWeights"),
    ("machine-dies-in-phase", 45, "StepRedone -> TrainStep"),
)
#: where trajectories move often
MOVED = (
    ("destination-ends-first", "TrajectoriesReleased -> GenerateTrajectory"),
    ("coordinator-killed-in-hand-over", "coordinator:killed-between-turns"),
    ("store-cut-in-hand-over", "ignored:late"),
    ("relay-lost-in-hand-over", "event:RelayReady"),
    ("evaluation-in-hand-over", "event:TrajectoriesReleased"),
    ("poison-in-tail", "dropped:quarantined"),
)

SEEDS_MAX = 60
"""Which seed meets a moment first changes with whatever changes the order of things."""
FAR = 5
"""Of so many seeds in vain the test complains: they cost half a second each."""


@pytest.mark.parametrize(("kind", "seed", "mark"), MOMENTS)
def test_aim_finds_its_moment(kind: str, seed: int, mark: str) -> None:
    for tried in range(seed, seed + SEEDS_MAX):
        outcome = run_seed(config(kind), tried)
        assert not outcome.invariant, (tried, outcome.details)
        assert outcome.faults == (kind,)
        if outcome.coverage.get(f"fault:{kind}") and outcome.coverage.get(mark):
            if tried - seed >= FAR:
                warnings.warn(f"{kind} meets {mark} with seed {tried} now", stacklevel=1)
            return
    pytest.fail(f"none of {SEEDS_MAX} seeds meets {mark}")


@pytest.mark.parametrize(("kind", "mark"), MOVED)
def test_aim_strikes_in_a_hand_over(kind: str, mark: str) -> None:
    swarm = config(kind, **PACKED, test_freq=2, num_eval=5, num_train=40, total_steps=0)
    for seed in range(1, 11):
        outcome = run_seed(swarm, seed)
        assert not outcome.invariant, (seed, outcome.details)
        if outcome.coverage.get(f"fault:{kind}") and outcome.coverage.get(mark):
            return
    pytest.fail(f"none of ten seeds meets {mark}")


def test_every_aim_is_tested() -> None:
    assert {kind for kind, *_ in (*MOMENTS, *MOVED)} == set(TARGETED)


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_lose_a_replica(way: str) -> None:
    """The coordinator hears of it as of such a loss, and somebody of that name comes back."""
    with World(calm(replicas=4, total_steps=0, num_train=100), 1) as world:
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
    with World(calm(replicas=4), 1) as world:
        lose(world.faults, world.rollouts[0], "replaced")
        assert not world.rollouts[0].alive


@pytest.mark.parametrize("role", FATAL_ROLES)
def test_what_a_run_needs_is_lost_in_every_way(role: str) -> None:
    """The run ends with a reason, whatever the way."""
    fatal = config("hangs", fatal_share=1.0, replicas=4, total_steps=4, num_train=60, seconds=30.0)
    met: set[str] = set()
    for seed in range(200):
        faults = World(fatal, seed).faults
        doomed = [process.name for process in faults.doomed()] if faults.fatal_role else []
        if faults.fatal_role != role or faults.fatal_way in met:
            continue
        outcome = run_seed(fatal, seed)
        assert not outcome.invariant, (seed, outcome.details)
        if any(name in outcome.failure for name in doomed):
            met.add(faults.fatal_way)
    assert met == set(WAYS) - ({"replaced"} if role in ("node", "relay") else set())


def test_an_aim_has_to_look() -> None:
    """What does not say when its moment is cannot be made."""
    world = World(calm(), 1)
    with pytest.raises(TypeError, match="look"):
        TargetedFault(world.faults, world.faults.chance("aim"))  # type: ignore[abstract]
