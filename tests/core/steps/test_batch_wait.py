"""The trainer has waited long enough: what happens to the answer that it waits for."""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, only, start_bench

WAIT_MS = 60_000


def waiting(**changes: object) -> Bench:
    """One group of two siblings per batch, on-policy; the trainer waits for group 0.0."""
    return start_bench(
        changes,
        groups_per_step=1,
        max_staleness=0,
        capacity=2,
        batch_timeout_ms=WAIT_MS,
        total_steps=2,
    )


def test_relocated_to_another_replica_of_the_version() -> None:
    """A slow machine holds the batch up and another one with the same version is free: the answers
    go on there with the tokens they have; the slow one is told to stop."""
    bench = waiting(replicas=2)
    commands = bench.wait(WAIT_MS)
    moved = only(cmd.GenerateTrajectory, commands)
    assert [(c.to, c.placement, c.attempt) for c in moved] == [("rollout-1", 2, 1)] * 2
    aborted = only(cmd.AbortTrajectories, commands)
    assert {(c.to, i.placement) for c in aborted for i in c.items} == {("rollout-0", 1)}


def test_dropped_when_enough_siblings_are_rewarded() -> None:
    """Three siblings, two rewarded, nobody else to run the third: the group is trained without it
    (min_scored=2), and the drop is counted as what it is."""
    bench = waiting(group_size=3, capacity=3)
    for sibling in ("0.0.0", "0.0.1"):
        bench.finish(sibling)
        bench.reward(sibling)
    trained = only(cmd.TrainStep, bench.wait(WAIT_MS))
    assert trained[0].trajectories == ("0.0.0", "0.0.1")
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.dropped == {"batch-timeout": 1}


def test_started_over_when_too_few_are_rewarded() -> None:
    """Nothing is rewarded and there is no other replica: both siblings begin again with other
    random numbers, so that an answer which runs in circles may end."""
    bench = waiting()
    seeds = {c.trajectory_id: c.seed for c in only(cmd.GenerateTrajectory, bench.commands)}
    again = only(cmd.GenerateTrajectory, bench.wait(WAIT_MS))
    assert [(c.attempt, c.placement) for c in again] == [(2, 2)] * 2
    assert all(c.seed != seeds[c.trajectory_id] for c in again)


def test_third_expiry_drops_the_group() -> None:
    """After the third wait for the same group it is given up; another prompt takes its place."""
    bench = waiting()
    commands = bench.wait(3 * WAIT_MS)
    assert bench.open_groups() == ["0.1"]
    assert [c.attempt for c in only(cmd.GenerateTrajectory, commands)] == [2, 2, 3, 3, 1, 1]
    bench.write_ends()
    assert bench.state.work.ledger.groups.dropped == {"batch-timeout": 1}


def test_slow_reward_is_asked_for_again() -> None:
    """The answers are complete, but a reward does not come: it is worked out once more, nothing is
    generated again."""
    bench = waiting()
    bench.finish("0.0.0")
    bench.finish("0.0.1")
    commands = bench.wait(WAIT_MS)
    assert len(only(cmd.ScoreTrajectories, commands)) == 2
    assert not only(cmd.GenerateTrajectory, commands)


def test_slow_reward_is_asked_for_elsewhere() -> None:
    """The replica that does not deliver it is the least loaded one: it would be asked for ever."""
    bench = waiting(replicas=2)
    bench.finish("0.0.0")
    bench.finish("0.0.1")
    assert {t.replica for t in bench.state.work.trajectories.values()} == {"rollout-0"}
    commands = bench.wait(WAIT_MS)
    assert {c.to for c in only(cmd.ScoreTrajectories, commands)} == {"rollout-1"}


def test_nothing_expires_while_the_trainer_works() -> None:
    """The clock runs only while the trainer waits."""
    bench = waiting(max_staleness=1)
    bench.complete("0.0")
    assert "batch-timeout" not in bench.state.orders.timers
    assert not only(cmd.GenerateTrajectory, bench.wait(10 * WAIT_MS))


def test_replica_that_samples_nothing_is_restarted() -> None:
    """It answers heartbeats and has work, but its engine is wedged."""
    bench = waiting(stall_ms=30_000)
    restart = only(cmd.RestartActor, bench.wait(30_000))
    assert [(c.to, c.actor) for c in restart] == [("node-0", "rollout-0")]
    assert "sampled nothing for 30000 ms" in restart[0].reason


def test_replica_that_samples_is_left_alone() -> None:
    """Its token count rises: slow is not wedged."""
    bench = waiting(stall_ms=30_000, batch_timeout_ms=10**9)
    for total in range(1, 8):
        assert not only(cmd.RestartActor, bench.wait(20_000))
        gauge = ev.TokenProgress(tokens_total=total, kv_used_tokens=1, running=2, waiting=0)
        bench.say("rollout-0", gauge)
