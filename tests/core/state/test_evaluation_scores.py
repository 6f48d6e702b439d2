"""What an evaluation says of its answers: several to a prompt, truncated ones, missing ones."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest

from laminar.core.state.evaluation_scores import (
    EXTRAS_MAX,
    REPORTED_FIELDS,
    EvaluationResult,
    EvaluationStatistics,
    describe_evaluation,
)
from laminar.core.state.scores import float_of
from laminar.events import commands as cmd
from tools.kit.bench import Bench, only, start_bench


def begun(answers: int = 1, num_eval: int = 2, **changes: object) -> Bench:
    """The first evaluation is under way, on a replica that has room for all of it."""
    return start_bench(
        num_eval=num_eval,
        capacity=16,
        groups_per_step=1,
        max_staleness=0,
        val_before_train=True,
        eval_answers=answers,
        **changes,
    )


def answer(bench: Bench, group: str, score: float, num_tokens: int = 10, **facts: object) -> None:
    bench.finish(f"{group}.0", num_tokens)
    bench.reward(f"{group}.0", score, **facts)  # type: ignore[arg-type]


def done(bench: Bench) -> EvaluationResult:
    (result,) = bench.state.evaluations.results
    return result


def figures(bench: Bench) -> EvaluationStatistics:
    found = done(bench).figures
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(12))
def test_an_evaluation_is_that_of_a_plain_count(seed: int) -> None:
    """Errors are those of prompts, since answers to one are alike; truncated ones are wrong,
    whatever the reward function thinks of what it got to see, and their scores count."""
    rng = random.Random(seed)
    answers, num_eval = rng.randint(1, 4), rng.choice([1, 2, 4])
    bench, given = begun(answers=answers, num_eval=num_eval), list[tuple[float, bool, int]]()
    for position in range(answers * num_eval):
        one = rng.choice([0.0, 0.25, 1.0, 1.0]), rng.random() < 0.3, rng.randint(1, 90)
        given.append(one)
        answer(bench, f"e0.{position}", one[0], num_tokens=one[2], truncated=one[1], acc=one[0])
    told = describe_evaluation(done(bench))
    scores = [score for score, _, _ in given]
    correct = [float(score == 1.0 and not truncated) for score, truncated, _ in given]
    assert (told["correct"], told["total"], told["missing"]) == (sum(correct), len(given), 0)
    assert told["mean_length"] == pytest.approx(fmean(tokens for _, _, tokens in given))
    assert told["truncated_share"] == pytest.approx(fmean(cut for _, cut, _ in given))
    assert told["extras"] == {"acc": pytest.approx(fmean(scores))}
    by_prompt = {
        name: [fmean(of[at : at + answers]) for at in range(0, len(of), answers)]
        for name, of in (("share", correct), ("score", scores))
    }
    assert told["passed"] == pytest.approx(fmean(share > 0 for share in by_prompt["share"]))
    for name, means in by_prompt.items():
        assert told[name] == pytest.approx(fmean(means))
        error = stdev(means) / math.sqrt(num_eval) if num_eval > 1 else None
        assert told[f"{name}_se"] == (None if error is None else pytest.approx(error))


def test_several_answers_to_a_prompt_are_drawn_from_seeds_of_their_own() -> None:
    """Each is a group by itself: rows 0, 0, 0, 1, 1, 1."""
    bench = begun(answers=3)
    asked = [c for c in only(cmd.GenerateTrajectory, bench.commands) if c.purpose == "eval"]
    assert [(c.group, c.row_index) for c in asked] == [(f"e0.{i}", i // 3) for i in range(6)]
    assert len({c.seed for c in asked}) == 6


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
