"""What an evaluation says of its answers: several to a prompt, truncated ones, missing ones."""

from __future__ import annotations

import math

from laminar.core.state.evaluation_scores import (
    EXTRAS_MAX,
    REPORTED_FIELDS,
    EvaluationResult,
    EvaluationStatistics,
    describe_evaluation,
)
from laminar.core.state.scores import float_of
from laminar.events import commands as cmd
from tools.kit.bench import Bench, only


def begun(answers: int = 1, num_eval: int = 2, **changes: object) -> Bench:
    """The first evaluation is under way, on a replica that has room for all of it."""
    bench = Bench(
        num_eval=num_eval,
        capacity=16,
        groups_per_step=1,
        max_staleness=0,
        val_before_train=True,
        eval_answers=answers,
        **changes,
    )
    bench.start()
    return bench


def answer(bench: Bench, group: str, score: float, num_tokens: int = 10, **facts: object) -> None:
    bench.finish(f"{group}.0", num_tokens)
    bench.reward(f"{group}.0", score, **facts)  # type: ignore[arg-type]


def done(bench: Bench) -> EvaluationResult:
    (result,) = bench.state.evaluations
    return result


def figures(bench: Bench) -> EvaluationStatistics:
    found = done(bench).figures
    assert found is not None
    return found


def test_mean_score_and_length_of_a_shaped_reward() -> None:
    """No answer has the full score, and still one sees which is better."""
    bench = begun()
    answer(bench, "e0.0", 0.25, num_tokens=10)
    answer(bench, "e0.1", 0.75, num_tokens=30)
    found = figures(bench)
    assert (done(bench).correct, found.passed, found.tokens) == (0, 0, 40)
    assert float_of(found.reward_bits) == 0.5
    assert math.isclose(float_of(found.score_se_bits), 0.25)  # sample std 0.3536 / sqrt(2)
    assert float_of(found.share_se_bits) == 0.0


def test_the_share_of_right_answers_has_its_standard_error() -> None:
    """8 of 16: the square root of p (1 - p) / (n - 1)."""
    bench = begun(num_eval=16)
    for row in range(16):
        answer(bench, f"e0.{row}", float(row % 2))
    assert (done(bench).correct, done(bench).total) == (8, 16)
    assert math.isclose(float_of(figures(bench).share_se_bits), math.sqrt(0.25 / 15))


def test_one_prompt_has_no_standard_error() -> None:
    bench = begun(num_eval=1)
    answer(bench, "e0.0", 1.0)
    assert float_of(figures(bench).share_se_bits) == 0.0


def test_truncated_answers_are_counted_and_wrong() -> None:
    """Whatever the reward function thinks of what it got to see."""
    bench = begun()
    answer(bench, "e0.0", 1.0, truncated=True)
    answer(bench, "e0.1", 1.0)
    assert (done(bench).correct, figures(bench).truncated) == (1, 1)
    assert float_of(figures(bench).reward_bits) == 1.0


def test_several_answers_to_a_prompt_are_drawn_from_seeds_of_their_own() -> None:
    """Each is a group by itself: rows 0, 0, 0, 1, 1, 1."""
    bench = begun(answers=3)
    asked = [c for c in only(cmd.GenerateTrajectory, bench.commands) if c.purpose == "eval"]
    assert [(c.group, c.row_index) for c in asked] == [(f"e0.{i}", i // 3) for i in range(6)]
    assert len({c.seed for c in asked}) == 6


def test_pass_at_n_counts_prompts_and_the_share_counts_answers() -> None:
    """Row 0: one of three is right; row 1: none. The error is that of two prompts, not of six
    answers, since answers to one prompt are alike."""
    bench = begun(answers=3)
    for position in range(6):
        answer(bench, f"e0.{position}", float(position == 2))
    found = figures(bench)
    assert (done(bench).total, done(bench).correct) == (6, 1)
    assert (found.answers_per_prompt, found.answered, found.prompts, found.passed) == (3, 6, 2, 1)
    assert math.isclose(float_of(found.share_se_bits), 1 / 6)  # of 1/3 and 0


def test_an_answer_lost_three_times_to_dead_replicas_is_missing_not_wrong() -> None:
    """The other two are right: the share is 2 of 2, and one is missing."""
    bench = begun(num_eval=3, num_train=0, total_steps=0)
    answer(bench, "e0.0", 1.0)
    answer(bench, "e0.1", 1.0)
    for boot in "bcd":
        bench.kill()
        bench.come_back(boot=boot)
        if bench.pull_of("rollout-0"):
            bench.load_all()
    found = figures(bench)
    assert (done(bench).total, done(bench).correct) == (3, 2)
    assert (found.answered, found.missing, found.prompts) == (2, 1, 2)


def test_a_lost_one_of_several_answers_runs_again_alone() -> None:
    bench = begun(answers=2, num_train=0, total_steps=0)
    for position in (0, 1, 2):
        answer(bench, f"e0.{position}", 1.0)
    bench.kill()
    bench.come_back()
    again = only(cmd.GenerateTrajectory, bench.load_all())
    assert [(c.group, c.row_index) for c in again] == [("e0.3-2", 1)]
    answer(bench, "e0.3-2", 1.0)
    assert (done(bench).correct, figures(bench).missing) == (4, 0)


def test_an_evaluation_of_which_every_answer_is_missing_ends() -> None:
    bench = begun(num_eval=1)
    for group in ("e0.0", "e0.0-2", "e0.0-3"):
        bench.finish(f"{group}.0")
        bench.fail(f"{group}.0", "reward-worker-lost")
    found = figures(bench)
    assert (found.answered, found.prompts, found.missing) == (0, 0, 1)
    assert float_of(found.reward_bits) == float_of(found.share_se_bits) == 0.0


def test_what_the_reward_gives_besides_the_score_is_a_mean_over_those_that_have_it() -> None:
    bench = begun()
    answer(bench, "e0.0", 1.0, acc=1.0, form=0.5)
    answer(bench, "e0.1", 1.0, acc=0.0)
    means = {name: float_of(bits) for name, bits in figures(bench).extras.items()}
    assert means == {"acc": 0.5, "form": 0.5}


def test_names_of_their_own_for_every_answer_do_not_fill_the_state() -> None:
    bench = begun()
    for row in range(2):
        answer(bench, f"e0.{row}", 1.0, **{f"{row}-{i}": 1.0 for i in range(EXTRAS_MAX)})
    assert list(figures(bench).extras) == [f"0-{i}" for i in range(EXTRAS_MAX)]


def test_an_evaluation_as_it_is_told() -> None:
    """Two answers to each of two prompts; one is truncated, one is lost for good."""
    bench = begun(answers=2, num_train=0, total_steps=0)
    answer(bench, "e0.0", 1.0, num_tokens=10, acc=1.0)
    answer(bench, "e0.1", 0.5, num_tokens=40, truncated=True, acc=0.0)
    answer(bench, "e0.2", 0.0, num_tokens=10)
    for group in ("e0.3", "e0.3-2", "e0.3-3"):
        bench.finish(f"{group}.0")
        bench.fail(f"{group}.0", "reward-worker-lost")
    told = describe_evaluation(done(bench))
    assert set(told) == set(REPORTED_FIELDS)
    assert (told["step"], told["version"], told["final"]) == (0, 0, False)
    assert (told["correct"], told["total"], told["missing"]) == (1, 4, 1)
    assert (told["answers_per_prompt"], told["passed"]) == (2, 0.5)
    assert (told["share"], told["score"], told["mean_length"]) == (1 / 3, 0.5, 20.0)
    assert (told["truncated_share"], told["extras"]) == (1 / 3, {"acc": 0.5})
    assert math.isclose(told["share_se"], 0.25)  # of 1/2 and 0
    assert math.isclose(told["score_se"], 0.375)  # of 0.75 and 0


def test_what_has_no_basis_is_not_told() -> None:
    bench = begun(num_eval=1)
    for group in ("e0.0", "e0.0-2", "e0.0-3"):
        bench.finish(f"{group}.0")
        bench.fail(f"{group}.0", "reward-worker-lost")
    told = describe_evaluation(done(bench))
    assert (told["missing"], told["share"], told["score"], told["share_se"]) == (
        1,
        None,
        None,
        None,
    )
    huge = begun()
    answer(huge, "e0.0", 1e308)
    answer(huge, "e0.1", 1e308)
    assert (describe_evaluation(done(huge))["score"], describe_evaluation(done(huge))["share"]) == (
        None,
        1.0,
    )
