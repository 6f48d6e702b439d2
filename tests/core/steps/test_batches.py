"""Which finished groups become a batch, in which order, and what a user's strategy may do."""

from __future__ import annotations

import pytest

from laminar.core import planner
from laminar.core.members import lifecycle
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names.ids import GroupId
from tools.kit.bench import Bench, only, start_bench
from tools.kit.world_parts import group_of

STRATEGY = "strategies.py:mine"


def trained(commands: list[Command]) -> list[str]:
    """Groups of the one batch among these commands, in the order in which they are trained."""
    steps = only(cmd.TrainStep, commands)
    assert len(steps) <= 1
    return list(dict.fromkeys(group_of(t) for s in steps for t in s.trajectories))


def test_earliest_deadline_and_dispatch_first_not_first_finished() -> None:
    """Short answers finish first. While batch 0 trains, groups 5, 4, 3, 2 finish in this order: the
    next batch is 2 and 3, those that were begun first."""
    bench = start_bench(max_staleness=2, groups_per_version=8, capacity=16)
    assert set(trained(bench.complete("0.0", "0.1"))) == {"0.0", "0.1"}
    bench.complete("0.5", "0.4", "0.3", "0.2")
    assert set(trained(bench.train())) == {"0.2", "0.3"}


def test_batch_is_shuffled_by_seed_with_siblings_together() -> None:
    """A gradient must not see prompts in the order of their dispatch; the shuffle is a hash of
    (seed, step), so the same seed trains the same order again."""

    def order(seed: int) -> list[str]:
        bench = start_bench(seed=seed, max_staleness=0, groups_per_step=8, capacity=16)
        commands = bench.complete(*bench.open_groups())
        ids = only(cmd.TrainStep, commands)[0].trajectories
        assert [group_of(a) == group_of(b) for a, b in zip(ids[::2], ids[1::2], strict=True)]
        return trained(commands)

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(4)}) > 1
    assert sorted(order(2)) == [f"0.{i}" for i in range(8)] != order(2)


def test_batch_that_would_break_the_bound_waits() -> None:
    """One group per batch, staleness 1. A long answer (0.0) was begun with the weights of step 0;
    two short ones finished since. Training the second of them as batch 1 would leave 0.0 without
    any batch that may still train it: so the trainer waits for 0.0."""
    bench = start_bench(groups_per_step=1, max_staleness=1, capacity=2, replicas=2)
    assert trained(bench.complete("0.1")) == ["0.1"]
    bench.train()
    bench.load("rollout-1")
    assert bench.group("0.2").deadline == 2
    assert trained(bench.complete("0.2")) == []
    assert "batch-timeout" in bench.state.orders.timers
    assert trained(bench.complete("0.0")) == ["0.0"]


def test_priority_takes_groups_whose_siblings_disagree() -> None:
    """All siblings right carries no advantage: the group that disagrees is trained first, and the
    other when the bound asks for it."""
    bench = start_bench(batch_strategy="priority", groups_per_step=1, max_staleness=2, capacity=16)
    bench.complete("0.0")
    bench.complete("0.1", scores=(1.0, 1.0))
    bench.complete("0.2")
    assert trained(bench.train()) == ["0.2"]
    assert trained(bench.train()) == ["0.1"]


def ask(bench: Bench) -> cmd.ProposeBatch:
    """Three of six groups finish while the trainer works; then the strategy is asked."""
    bench.start()
    first = only(cmd.ProposeBatch, bench.complete("0.0", "0.1"))
    bench.own(propose(first[0], "0.0", "0.1"))
    bench.complete("0.2", "0.3", "0.4")
    asked = only(cmd.ProposeBatch, bench.train())
    assert len(asked) == 1
    return asked[0]


def propose(question: cmd.ProposeBatch, *groups: str) -> ev.BatchProposed:
    return ev.BatchProposed(
        step_index=question.step_index, groups=tuple(GroupId(g) for g in groups)
    )


def strategy_bench() -> Bench:
    return Bench(batch_strategy=STRATEGY, max_staleness=2, groups_per_version=8, capacity=16)


def test_user_strategy_sees_metadata_and_its_answer_is_trained() -> None:
    """The user's function gets deadlines, token counts and scores, and picks groups 4 and 2."""
    bench = strategy_bench()
    question = ask(bench)
    assert (question.step_index, question.count) == (1, 2)
    assert [c.group for c in question.candidates] == ["0.2", "0.3", "0.4"]
    assert question.candidates[0].rewards == (0.0, 1.0)
    assert question.candidates[0].num_tokens == 20
    assert set(trained(bench.own(propose(question, "0.4", "0.2")))) == {"0.2", "0.4"}


def test_unusable_answers_fall_back_to_the_default() -> None:
    """A group that is not finished, one named twice, too few, too many, none: the default batch is
    trained, and the answer is counted."""
    for answer in (["0.5", "0.2"], ["0.4", "0.4"], ["0.4"], ["0.2", "0.3", "0.4"], []):
        bench = strategy_bench()
        question = ask(bench)
        assert set(trained(bench.own(propose(question, *answer)))) == {"0.2", "0.3"}, answer
        assert bench.state.run.ignored == {"BatchProposed: unusable-proposal": 1}


def test_answer_against_the_bound_falls_back() -> None:
    """The strategy wants the newest group; the oldest could then never be trained."""
    bench = start_bench(
        batch_strategy=STRATEGY, groups_per_step=1, max_staleness=1, capacity=2, replicas=2
    )
    question = only(cmd.ProposeBatch, bench.complete("0.1"))[0]
    bench.own(propose(question, "0.1"))
    bench.complete("0.0")
    question = only(cmd.ProposeBatch, bench.train())[0]
    bench.load("rollout-1")
    bench.complete("0.2")
    assert trained(bench.own(propose(question, "0.2"))) == ["0.0"]


def test_late_answer_falls_back_after_five_seconds_and_is_ignored() -> None:
    """The user's function hangs: the trainer waits no longer than the timeout for it."""
    bench = strategy_bench()
    question = ask(bench)
    assert trained(bench.wait(4_999)) == []
    assert set(trained(bench.wait(1))) == {"0.2", "0.3"}
    assert bench.own(propose(question, "0.4", "0.2")) == []
    assert bench.state.run.ignored == {"BatchProposed: late": 1}


def test_end_of_data_trains_the_rest_as_a_short_batch() -> None:
    """Three prompts, two per batch: the third is trained alone, then the model is exported."""
    bench = start_bench(total_steps=0, num_train=3, capacity=16, drop_last=False)
    bench.complete("0.0", "0.1", "0.2")
    assert trained(bench.train()) == ["0.2"]
    assert only(cmd.ExportModel, bench.train())


def test_drop_last_drops_the_rest() -> None:
    """The same with drop_last: the third prompt ends as dropped, with its reason."""
    bench = start_bench(total_steps=0, num_train=3, capacity=16, drop_last=True)
    bench.complete("0.0", "0.1", "0.2")
    commands = bench.train()
    assert trained(commands) == []
    assert only(cmd.ExportModel, commands)
    bench.write_ends()
    assert bench.state.work.ledger.groups.dropped == {"end-of-data": 1}
    assert bench.state.work.ledger.groups.trained == 2


def test_short_batch_waits_for_what_is_still_generated() -> None:
    """The rest is one batch, not several: while a group is unfinished, the trainer waits."""
    bench = start_bench(total_steps=0, num_train=4, groups_per_step=3, capacity=16)
    bench.complete("0.0", "0.1", "0.2")
    assert trained(bench.train()) == []
    assert trained(bench.complete("0.3")) == ["0.3"]


def test_prompts_come_in_a_permutation_of_each_pass() -> None:
    """Two passes over five prompts: every row once in each, in different orders, and group ids
    that never repeat."""
    bench = Bench(total_steps=0, total_epochs=2, num_train=5, groups_per_step=1, capacity=2)
    commands = bench.start()
    while bench.state.run.phase == "running":
        commands += bench.complete(*bench.open_groups())
        if bench.state.steps.batch is not None:
            commands += bench.train()
        commands += bench.load_all()
    rows = {c.group: c.row_index for c in only(cmd.GenerateTrajectory, commands)}
    assert list(rows) == [f"{p}.{i}" for p in range(2) for i in range(5)]
    first, second = list(rows.values())[:5], list(rows.values())[5:]
    assert sorted(first) == sorted(second) == list(range(5)) and first != second


def test_without_shuffle_prompts_come_in_the_order_of_the_data() -> None:
    bench = Bench(shuffle=False, max_staleness=2)
    commands = bench.start()
    rows = dict.fromkeys(c.row_index for c in only(cmd.GenerateTrajectory, commands))
    assert list(rows) == list(range(len(rows))) and len(rows) == 4


def test_planner_that_finds_no_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that always has something to decide must not hang the coordinator."""
    bench = Bench()
    monkeypatch.setattr(lifecycle, "plan_phase", lambda ctx: True)
    monkeypatch.setattr(planner, "PLAN_ROUNDS_MAX", 10)
    with pytest.raises(AssertionError, match="not reach a fixpoint"):
        bench.join("node-0")
