"""The staleness bound and on-policy control, told by hand."""

from __future__ import annotations

import pytest

from laminar.core.repack.stragglers import released_max
from laminar.core.scheduling.admission import (
    bound_holds,
    find_full_resource,
    first_share,
    get_replica_share,
)
from laminar.events import commands as cmd
from tools.kit.bench import Bench, only, start_bench


def test_bound_counts_from_the_batch_before_the_next_one() -> None:
    """Two groups per batch, batch 5 is next: what had to be trained by batch 4 must be gone, batch
    5 takes two, batches 5 and 6 take four."""
    assert bound_holds({5: 2, 6: 2}, chosen=5, groups_per_step=2)
    assert bound_holds({5: 1, 6: 3}, chosen=5, groups_per_step=2)
    assert not bound_holds({5: 3}, chosen=5, groups_per_step=2)
    assert not bound_holds({5: 2, 6: 3}, chosen=5, groups_per_step=2)
    assert not bound_holds({4: 1}, chosen=5, groups_per_step=2)
    assert bound_holds({}, chosen=5, groups_per_step=2)


@pytest.mark.parametrize(("max_staleness", "groups"), [(0, 2), (2, 6)])
def test_one_batch_more_than_the_bound_is_begun(max_staleness: int, groups: int) -> None:
    """With room for eight groups; the weights of step 0 may serve batches 0, 1 and 2."""
    bench = Bench(max_staleness=max_staleness, groups_per_version=8, capacity=16)
    started = only(cmd.GenerateTrajectory, bench.start())
    assert {c.group for c in started} == {f"0.{number}" for number in range(groups)}
    assert len(started) == 2 * groups


def test_on_policy_dispatches_nothing_between_choice_and_new_weights() -> None:
    """With max_staleness=0 a group begun after the choice of batch 0 could only be trained by batch
    1, with weights that are one step old. So the replica idles until it has loaded version 1."""
    bench = start_bench(max_staleness=0, groups_per_version=8, capacity=16)
    for step in range(3):
        chosen = bench.complete(*bench.open_groups())
        assert len(only(cmd.TrainStep, chosen)) == 1
        silent = bench.train(publish=False) + bench.wait(1000)
        assert not only(cmd.GenerateTrajectory, chosen + silent)
        published = bench.publish(step + 1, step + 1)
        assert [c.version for c in only(cmd.PullWeights, published)] == [step + 1]
        assert not only(cmd.GenerateTrajectory, published)
        started = only(cmd.GenerateTrajectory, bench.load("rollout-0"))
        assert {c.version for c in started} == {step + 1} and len(started) == 4


def test_replica_drains_after_its_share_only_if_something_newer_waits() -> None:
    """groups_per_version=1: a second group is begun with old weights as long as the relay has
    nothing newer; once it has, the replica takes no more and pulls when it is empty."""
    bench = start_bench(max_staleness=2, groups_per_version=1, capacity=2)
    assert only(cmd.GenerateTrajectory, bench.complete("0.0"))
    assert bench.replica().groups_taken == 2
    bench.complete("0.1")  # the first batch is full
    bench.train()
    assert not only(cmd.GenerateTrajectory, bench.complete("0.2"))
    assert bench.replica().groups_taken == 3
    pull = bench.pull_of("rollout-0")
    assert pull is not None and pull.purpose == "newer" and pull.version == 1
    assert only(cmd.GenerateTrajectory, bench.load("rollout-0"))
    assert bench.replica().groups_taken == 1


def test_dropped_group_gives_its_place_back() -> None:
    """On-policy, two groups per batch: one of them fails altogether. Its place in the batch is
    free, so a third prompt is begun at once and the batch is chosen without the failed one."""
    bench = start_bench(max_staleness=0, groups_per_version=2, capacity=4)
    bench.fail("0.0.0")
    started = only(cmd.GenerateTrajectory, bench.fail("0.0.1"))
    assert {c.group for c in started} == {"0.2"}
    bench.complete("0.1")
    trained = only(cmd.TrainStep, bench.complete("0.2"))
    assert {t.rpartition(".")[0] for t in trained[0].trajectories} == {"0.1", "0.2"}
    bench.write_ends()
    assert bench.state.work.ledger.groups.dropped == {"too-few-scored": 1}
    assert bench.state.work.ledger.trajectories.dropped == {"unscored": 2}


def shared_out(policy: str) -> Bench:
    """Two replicas of which each has room for all four groups that the bound admits."""
    return start_bench(
        replicas=2,
        max_staleness=1,
        groups_per_version=4,
        repack_policy=policy,
        repack_interval_ms=5_000,
    )


def running(bench: Bench) -> list[int]:
    return [len(bench.replica(name).running) for name in bench.names]


def test_with_gain_each_replica_has_its_part_of_what_the_bound_admits() -> None:
    bench = shared_out("gain")
    assert running(bench) == [4, 4]
    bench.complete("0.2", "0.3")  # of rollout-1; they are a batch, and leave room for two others
    bench.train()
    bench.load("rollout-1")
    assert running(bench) == [4, 4] and not released_max(bench.state)


def test_without_gain_the_first_replica_takes_all() -> None:
    for bench in (shared_out("best-fit"), shared_out("")):
        assert running(bench) == [8, 0]


def test_share_is_of_the_replicas_that_live() -> None:
    bench = shared_out("gain")
    assert (get_replica_share(bench.state), first_share(bench.state)) == (4, 2)
    bench.kill("rollout-1")
    assert (get_replica_share(bench.state), first_share(bench.state)) == (8, 4)


def test_what_another_group_has_too_little_room_in() -> None:
    bench = Bench(max_staleness=2, capacity=5)
    assert len(bench.start()) and find_full_resource(bench.state, bench.replica()) == "slots"
    bench = Bench(max_staleness=20, capacity=20, max_sessions=5)
    assert len(bench.start()) and find_full_resource(bench.state, bench.replica()) == "sessions"
    bench = Bench(max_staleness=0, capacity=5, max_sessions=20)  # a group takes no slots
    assert len(bench.start()) and find_full_resource(bench.state, bench.replica()) is None
