"""no_recovery_without_a_cause finds what the product does again for nothing, or too dearly.

Each of these bugs leaves every other promise kept: the run completes, and its books agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laminar.core import loading
from laminar.core.context import Context
from laminar.core.scheduling import recovery
from laminar.core.state import indexes
from laminar.core.state.state import Replica, State, Trajectory
from laminar.core.state.statuses import GroupStatus
from laminar.core.state.transitions import IN_ENGINE
from laminar.core.steps import batching
from laminar.events.base import Stamped
from laminar.events.reasons import PullPurpose
from laminar.names import exit_codes
from tests.core.test_lost_replica import behind_a_turn
from tools.kit.sim_worlds import calm, config
from tools.simulator.checks.recoveries import NAME, Recoveries
from tools.simulator.run import make_world, run_seed
from tools.simulator.runtime.violation import Violation

SMALL = {"replicas": 4, "num_train": 40, "total_steps": 3, "num_eval": 5}
LAST = "only-one-of-its-version-lost"
LOSSES = ("replica-dies", "replica-leaves")


def found(outcome: object) -> tuple[str, str]:
    return getattr(outcome, "invariant", ""), getattr(outcome, "details", "")


def swarm(*faults: str, **changes: object) -> Iterator[tuple[str, str]]:
    """Worlds in which replicas are lost, by what was found in each."""
    for seed in range(1, 9):
        yield found(run_seed(config(*(faults or LOSSES), **changes), seed))


def test_lost_work_starts_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a replica of its version is there, or could be."""

    def planted(ctx: Context, name: str, *, blame: bool) -> None:
        replica_lost(ctx, name, blame=blame)
        for trajectory_id in ctx.state.lost:
            indexes.begin_again(ctx.state, ctx.state.trajectories[trajectory_id])

    replica_lost = recovery.replica_lost
    monkeypatch.setattr(recovery, "replica_lost", planted)
    assert any(name == NAME and "starts over" in what for name, what in swarm(**SMALL))


def test_lost_work_waits_though_its_version_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "plan_lost", lambda ctx: None)
    assert any(name == NAME and "waits, and" in what for name, what in swarm(**SMALL))


def test_a_held_out_answer_waits_for_room_at_its_own_version() -> None:
    """In flight, behind a turn: the replica of its session is full, and the other one, which has
    room, has newer weights by now."""
    bench, event = behind_a_turn()
    home, other = bench.replica("rollout-0"), bench.replica("rollout-1")
    assert (home.version, len(home.running)) == (0, 5)
    assert (other.version, len(other.running)) == (1, 4)
    commands = bench.say("rollout-0", event)
    assert list(bench.state.lost) == ["e0.0.0"] and not commands
    stamped = Stamped(
        seq=bench.seq, time_ns=0, peer="rollout-0", incarnation=1, peer_seq=1, event=event
    )
    Recoveries(make_world(calm(), 1)).observe(stamped, commands, bench.state)


def test_no_empty_replica_loads_the_version_of_lost_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_version_of_lost_work", lambda state, replica: -1)
    monkeypatch.setattr(loading, "_wanted_by_lost_work", lambda state: [])
    assert any(name == NAME and "could load" in what for name, what in swarm(LAST))


def test_a_version_that_a_replica_has_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when it is idle."""

    def planted(ctx: Context, replica: Replica) -> None:
        plan_pull(ctx, replica)
        idle = loading._can_pull(ctx.state, replica) and replica.version >= 0
        if idle and replica.name not in again:
            again.add(replica.name)
            loading.pull(ctx, replica, replica.version, False, PullPurpose.NEWER)

    again: set[str] = set()
    plan_pull = loading.plan_pull
    monkeypatch.setattr(loading, "plan_pull", planted)
    name, what = found(run_seed(calm(**SMALL), 3))
    assert name == NAME and "is to load it" in what


def test_a_checkpoint_is_loaded_though_the_relay_has_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(
        ctx: Context, replica: Replica, version: int, exact: bool, purpose: PullPurpose
    ) -> None:
        pull(ctx, replica, version, exact, purpose)
        command = ctx.commands[-1]
        if exact and version in ctx.state.saved:
            ctx.commands[-1] = type(command)(
                **{f: getattr(command, f) for f in command.__struct_fields__}
                | {"checkpoint": ctx.state.saved[version]}
            )

    pull = loading.pull
    monkeypatch.setattr(loading, "pull", planted)
    assert any(
        name == NAME and "from the disk" in what
        for name, what in swarm(LAST, save_freq=1, max_ckpt_to_keep=5)
    )


def test_a_replica_that_works_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its progress is not looked at."""

    def planted(ctx: Context, name: str) -> None:
        replica = ctx.state.replicas.get(name)
        if replica is not None:
            ctx.restart(name, "sampled nothing")
        watch(ctx, name)

    watch = recovery.watch_progress
    monkeypatch.setattr(recovery, "watch_progress", planted)
    name, what = found(run_seed(calm(stall_ms=1_000, **SMALL), 3))
    assert name == NAME and "nothing struck it" in what


def test_a_process_that_ends_without_a_fault() -> None:
    with make_world(calm(**SMALL), 3) as world:
        world.begin()
        victim = world.rollouts[0]
        while not victim.welcomed:
            world.scheduler.step()
        victim.die(exit_codes.KILLED)
        with pytest.raises(Violation, match=f"{NAME}: rollout-0/2 is started"):
            while not world.finished:
                world.scheduler.step()


def test_work_is_taken_from_a_replica_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a batch is chosen, something that runs is placed elsewhere."""

    def planted(ctx: Context) -> bool:
        chosen = choose_batch(ctx)
        if chosen and (trajectory := _runs(ctx.state)) is not None:
            recovery.lose(ctx, trajectory.id)
        return chosen

    choose_batch = batching.choose_batch
    monkeypatch.setattr(batching, "choose_batch", planted)
    name, what = found(run_seed(calm(**SMALL), 3))
    assert name == NAME and "has lost" in what


def _runs(state: State) -> Trajectory | None:
    opened = (g for g in state.groups.values() if g.status == GroupStatus.OPEN)
    running = (state.trajectories[name] for group in opened for name in group.members)
    return next((t for t in running if t.status in IN_ENGINE), None)
