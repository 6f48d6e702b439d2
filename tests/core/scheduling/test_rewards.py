"""Rewards: one sibling at a time, or a whole group together; what fails and what it costs."""

from __future__ import annotations

import struct

import pytest

from laminar.core.state import scores
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, bits_of, only, start_bench


def scored(commands: list[cmd.Command]) -> list[list[str]]:
    return [[i.trajectory_id for i in c.items] for c in only(cmd.ScoreTrajectories, commands)]


def begun(**changes: object) -> Bench:
    return start_bench(changes, groups_per_step=1, max_staleness=0, group_size=3, capacity=6)


def test_each_sibling_is_scored_when_it_is_complete() -> None:
    """The reward of a short answer is worked out while its siblings still generate."""
    bench = begun()
    assert scored(bench.finish("0.0.1")) == [["0.0.1"]]
    assert scored(bench.finish("0.0.0")) == [["0.0.0"]]


def test_group_scored_rewards_wait_for_the_last_sibling() -> None:
    """A reward that compares siblings (a ranking) needs all of them at once."""
    bench = begun(reward_scope="group")
    assert scored(bench.finish("0.0.1") + bench.finish("0.0.0")) == []
    assert scored(bench.finish("0.0.2")) == [["0.0.0", "0.0.1", "0.0.2"]]


def test_group_scored_rewards_go_on_without_a_failed_sibling() -> None:
    """The last sibling is refused (its log-probs are not finite): the two that waited for it are
    scored together."""
    bench = begun(reward_scope="group")
    bench.finish("0.0.0")
    bench.finish("0.0.1")
    assert scored(bench.fail("0.0.2", "store-refused")) == [["0.0.0", "0.0.1"]]
    bench.reward("0.0.0")
    assert only(cmd.TrainStep, bench.reward("0.0.1", 0.0))[0].trajectories == ("0.0.0", "0.0.1")


def test_group_scored_replica_dies_while_it_scores() -> None:
    """Half of the ranking had arrived: another replica is asked for those that are missing."""
    bench = begun(reward_scope="group", replicas=2)
    for sibling in ("0.0.0", "0.0.1", "0.0.2"):
        bench.finish(sibling)
    bench.reward("0.0.0")
    commands = bench.kill("rollout-0")
    assert [(c.to, len(c.items)) for c in only(cmd.ScoreTrajectories, commands)] == [
        ("rollout-1", 2)
    ]


def test_unscored_sibling_is_dropped_never_zero() -> None:
    """The reward worker was lost too often. A zero would teach the model that a good answer is
    bad; the group is trained with the other two."""
    bench = begun()
    for sibling in ("0.0.0", "0.0.1", "0.0.2"):
        bench.finish(sibling)
    bench.fail("0.0.0", "reward-worker-lost")
    bench.reward("0.0.1")
    assert only(cmd.TrainStep, bench.reward("0.0.2", 0.0))[0].trajectories == ("0.0.1", "0.0.2")
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.dropped == {"reward-worker-lost": 1}
    assert bench.state.work.ledger.tokens.dropped == {"reward-worker-lost": 10}


def test_group_with_too_few_rewards_is_dropped_whole() -> None:
    """min_scored=2: one reward has no advantage. What it cost stays in the books."""
    bench = begun()
    for sibling in ("0.0.0", "0.0.1", "0.0.2"):
        bench.finish(sibling)
    bench.reward("0.0.0")
    bench.fail("0.0.1")
    bench.fail("0.0.2")
    bench.write_ends()
    assert bench.state.work.ledger.groups.dropped == {"too-few-scored": 1}
    assert bench.state.work.ledger.tokens.dropped == {"unscored": 20, "too-few-scored": 10}


def test_what_the_trainer_leaves_out_is_dropped_and_its_siblings_are_trained() -> None:
    """A row that did not come from its version is not trained, and no book says that it was."""
    bench = begun()
    bench.complete("0.0")
    bench.train(left_out=["0.0.1"])
    bench.write_ends()
    ledger = bench.state.work.ledger
    assert (ledger.trajectories.trained, ledger.trajectories.dropped) == (2, {"mismatch": 1})
    assert (ledger.groups.trained, ledger.groups.dropped) == (1, {})
    assert (ledger.tokens.trained, ledger.tokens.dropped) == (20, {"mismatch": 10})


def test_a_group_that_is_left_out_whole_is_dropped_and_its_step_counts() -> None:
    bench = begun()
    bench.complete("0.0")
    bench.train(left_out=["0.0.0", "0.0.1", "0.0.2", "of no batch"])
    bench.write_ends()
    state, steps = bench.state, bench.state.steps
    assert (steps.completed, steps.staleness_sum, state.work.ledger.groups.trained) == (1, 0, 0)
    assert state.work.ledger.groups.dropped == {"mismatch": 1}
    assert state.work.ledger.trajectories.dropped == {"mismatch": 3}


def test_sibling_that_fails_while_it_generates_frees_its_place() -> None:
    """Its replica is told to stop the others only when the group is given up."""
    bench = begun()
    commands = bench.fail("0.0.0", "store-refused")
    assert {i.trajectory_id for c in only(cmd.AbortTrajectories, commands) for i in c.items} == {
        "0.0.0"
    }
    assert list(bench.replica().running) == ["0.0.1", "0.0.2"]


def test_tokens_of_earlier_attempts_are_dropped_as_restarted() -> None:
    """The store counted 7 tokens of an attempt that was thrown away, and 10 that were trained."""
    bench = begun()
    bench.complete("0.0")
    bench.train()
    outstanding = next(o for k, o in bench.state.orders.commands.items() if k.startswith("end:"))
    assert isinstance(outstanding.command, cmd.EndTrajectories)
    rows = tuple(
        ev.EndedTrajectory(trajectory_id=e.trajectory_id, num_tokens=10, tokens_lost=7)
        for e in outstanding.command.endings
    )
    bench.say("store-0", ev.TrajectoriesEnded(command_id=outstanding.command_id, ended=rows))
    tokens = bench.state.work.ledger.tokens
    assert (tokens.issued, tokens.trained, tokens.dropped) == (51, 30, {"restarted": 21})


@pytest.mark.parametrize("score", [0.0, -0.0, 0.1, -1e300, 5e-324])
def test_scores_keep_every_bit(score: float) -> None:
    bits = scores.bits_of(score)
    assert bits == bits_of(score)
    assert struct.pack("<d", scores.float_of(bits)) == struct.pack("<d", score)
