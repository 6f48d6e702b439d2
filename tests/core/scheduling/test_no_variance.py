"""Groups whose answers are all alike, where they are filtered: dropped, refilled, counted."""

from __future__ import annotations

import pytest

from laminar.core.state.failures import FailureKind
from laminar.core.state.statuses import GroupStatus
from laminar.events import commands as cmd
from tools.kit.bench import Bench, only, start_bench

FLAT, MIXED = (1.0, 1.0), (0.0, 1.0)


def begun(**changes: object) -> Bench:
    """Two groups of two a batch."""
    return start_bench(changes, filter_metric="score", max_staleness=0, capacity=4)


def begins(commands: list[cmd.Command]) -> set[str]:
    """The groups that are handed out."""
    return {c.group for c in only(cmd.GenerateTrajectory, commands)}


def test_a_group_of_equal_scores_is_dropped_and_another_prompt_takes_its_place() -> None:
    """All four slots are taken, and no step is made: the third prompt has the deadline and the slot
    of the first one, within a bound of no staleness at all."""
    bench = begun()
    assert bench.state.work.deadlines == {0: 2}
    assert begins(bench.complete("0.0", scores=FLAT)) == {"0.2"}
    assert bench.state.work.deadlines == {0: 2}
    bench.write_ends()
    ledger = bench.state.work.ledger
    assert ledger.groups.dropped == {"no-variance": 1}
    assert ledger.trajectories.dropped == {"no-variance": 2}
    assert ledger.tokens.dropped == {"no-variance": 20}
    trained = only(cmd.TrainStep, bench.complete("0.1", "0.2", scores=MIXED))
    assert {t.rpartition(".")[0] for t in trained[0].trajectories} == {"0.1", "0.2"}


@pytest.mark.parametrize(
    ("metric", "scores", "dropped"),
    [
        ("score", (0.5, 0.5), True),
        ("score", (0.0, -0.0), True),
        ("score", (0.5, 0.25), False),
        ("score", (1.0, 2.0), False),
        ("acc", (1.0, 2.0), True),
        ("acc", (0.5, 0.25), True),
        ("acc", (0.5, 1.0), False),
        ("", (1.0, 1.0), False),
    ],
)
def test_what_a_metric_tells_apart(metric: str, scores: tuple[float, ...], dropped: bool) -> None:
    """acc: right or wrong, whatever the score."""
    bench = begun(filter_metric=metric)
    bench.complete("0.0", scores=scores)
    assert bench.group("0.0").status == (GroupStatus.ENDING if dropped else GroupStatus.READY)


def test_an_answer_cut_at_the_limit_is_not_right() -> None:
    bench = begun(filter_metric="acc")
    for member in ("0.0.0", "0.0.1"):
        bench.finish(member)
    bench.reward("0.0.0")
    bench.reward("0.0.1", truncated=True)
    assert bench.group("0.0").status == GroupStatus.READY


def test_only_answers_with_a_score_are_compared() -> None:
    """The third sibling is refused: it is neither alike nor different."""
    bench = begun(group_size=3, capacity=6)
    for member in ("0.0.0", "0.0.1", "0.0.2"):
        bench.finish(member)
    bench.reward("0.0.0", 0.5)
    bench.reward("0.0.1", 0.5)
    bench.fail("0.0.2")
    bench.write_ends()
    assert bench.state.work.ledger.groups.dropped == {"no-variance": 1}
    assert bench.state.work.ledger.trajectories.dropped == {"no-variance": 2, "unscored": 1}


def test_a_single_answer_is_compared_with_nothing() -> None:
    bench = begun(group_size=1, min_scored=1)
    bench.complete("0.0", scores=FLAT)
    assert bench.group("0.0").status == GroupStatus.READY


def test_held_out_answers_are_not_filtered() -> None:
    bench = begun(num_eval=1, eval_answers=2, test_freq=1, val_before_train=True, capacity=8)
    bench.complete("e0.0", "e0.1", scores=FLAT)
    bench.write_ends()
    assert bench.state.work.ledger.groups.evaluated == 2


# --- too many in a row ----------------------------------------------------------------------------


def test_so_many_in_a_row_end_the_run_with_a_sentence() -> None:
    bench = begun(filter_batches=2)
    for group in ("0.0", "0.1", "0.2"):
        bench.complete(group, scores=FLAT)
    assert not bench.state.run.draining
    commands = bench.complete("0.3", scores=(0.0, 0.0))
    assert not begins(commands)
    assert bench.state.run.drain_failure.sentence == (
        "no two responses differ in any of the last 4 groups, 3 of them all correct, by "
        "algorithm.filter_groups.metric = score "
        "(algorithm.filter_groups.max_num_gen_batches = 2 batches): give prompts that are neither "
        "too easy nor too hard, or set algorithm.filter_groups.enable = false"
    )
    assert bench.state.run.drain_failure.kind == FailureKind.NO_VARIANCE


def test_one_that_is_kept_begins_the_row_again() -> None:
    bench = begun(filter_batches=1, capacity=20)
    bench.complete("0.0", scores=FLAT)
    bench.complete("0.1", scores=MIXED)
    bench.complete("0.2", scores=FLAT)
    assert not bench.state.run.draining
    bench.complete("0.3", scores=FLAT)
    assert bench.state.run.draining


def test_without_a_limit_the_end_of_the_data_ends_it() -> None:
    """Nothing was trained: that is no success."""
    bench = begun(total_steps=0, num_train=5)
    for group in range(5):
        assert not bench.state.run.draining
        bench.complete(f"0.{group}", scores=FLAT)
    assert "(the data has ended, and nothing was trained)" in bench.state.run.drain_failure.sentence
    assert "the last 5 groups, 5 of them all correct" in bench.state.run.drain_failure.sentence


def test_flat_groups_after_a_step_end_no_run() -> None:
    bench = begun(total_steps=0, num_train=3, max_staleness=1, capacity=6)
    bench.complete("0.0", "0.1")
    bench.train()
    bench.complete("0.2", scores=FLAT)
    assert (bench.state.run.phase, bench.state.run.drain_failure) == ("exporting", None)
