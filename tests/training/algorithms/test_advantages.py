"""Advantages of a whole batch: constant groups, estimators, rows that are left out, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laminar.config import Config
from laminar.config.algorithm_rules import ESTIMATORS
from laminar.training.algorithms.advantages import Estimator, Floats, with_penalties
from laminar.training.steps import TrainSample

Make = Callable[..., Config]
Estimate = Callable[..., Floats]
WITHOUT_CRITIC = [name for name in ESTIMATORS if name != "gae"]


@pytest.fixture
def advantages(make_config: Make, make_samples: Callable[..., list[TrainSample]]) -> Estimate:
    """The advantages of groups of these rewards, one after the other."""

    def estimate(*groups: Sequence[float], name: str = "grpo", by_std: bool = True) -> Floats:
        keys = {"algorithm.adv_estimator": name, "algorithm.norm_adv_by_std_in_grpo": by_std}
        samples = []
        for number, rewards in enumerate(groups):
            rows = make_samples(1, len(rewards), number)
            for i, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
                sample = replace(row, sample_id=f"{number}.{i}", group_id=str(number))
                samples.append(replace(sample, reward=reward))
        found = Estimator(make_config(keys).algorithm).assign_advantages(samples)
        return np.array([s.advantage for s in found])

    return estimate


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_equal_rewards_give_exactly_zero(
    size: int, reward: float, name: str, advantages: Estimate
) -> None:
    found = advantages([reward] * size, name=name)
    assert found.dtype == np.float64
    assert found.tolist() == [0.0] * size


def test_spread_at_the_limit_is_constant_and_beyond_it_is_not(advantages: Estimate) -> None:
    assert advantages([0.0, 1e-6]).tolist() == [0.0, 0.0]
    assert advantages([0.0, 2e-6])[1] > 0.1


@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_rloo_is_the_mean_of_the_others_and_scaled_dr_grpo(size: int, advantages: Estimate) -> None:
    rewards = np.random.default_rng(size).random(size).tolist()
    rloo = advantages(rewards, name="rloo")
    others = [r - (sum(rewards) - r) / (size - 1) for r in rewards]
    np.testing.assert_allclose(rloo, others, rtol=1e-10)
    plain = advantages(rewards, by_std=False)
    np.testing.assert_allclose(rloo, size / (size - 1) * plain, rtol=1e-10)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_a_row_that_is_left_out_is_in_no_baseline(
    name: str, make_config: Make, make_samples: Callable[..., list[TrainSample]]
) -> None:
    estimator = Estimator(make_config({"algorithm.adv_estimator": name}).algorithm)
    samples = make_samples(3, 4)
    gone = {samples[1].sample_id, samples[6].sample_id}
    kept = [s for s in samples if s.sample_id not in gone]
    found = {s.sample_id: s.advantage for s in estimator.assign_advantages(samples, gone)}
    assert [found[name] for name in gone] == [0.0, 0.0]
    for sample in estimator.assign_advantages(kept):
        np.testing.assert_array_equal(sample.advantage, found[sample.sample_id])


def test_rewards_that_are_not_finite_are_refused(advantages: Estimate) -> None:
    with pytest.raises(ValueError, match=r"0\.1 has reward nan"):
        advantages([1.0, float("nan")])


def test_a_user_may_give_each_token_an_advantage(
    make_config: Make, make_samples: Callable[..., list[TrainSample]], tmp_path: Any
) -> None:
    """Half of it for the first half of a response, as an example; extras are there by name."""
    file = tmp_path / "my.py"
    file.write_text(
        "import numpy as np\n"
        "def growing(batch):\n"
        "    places = np.concatenate([np.arange(n) for n in batch.lengths])\n"
        "    return places + batch.per_token(batch.extras['bonus'])\n"
    )
    config = make_config({"algorithm.adv_estimator": f"{file}:growing"})
    samples = make_samples(2, 3, extras={"bonus": 0.5})
    for sample in Estimator(config.algorithm).assign_advantages(samples):
        expected = np.arange(len(sample.response_ids)) + 0.5
        np.testing.assert_array_equal(sample.token_advantages, expected)


def test_the_last_tokens_before_the_longest_answer_cost_reward(
    make_config: Make, make_samples: Callable[..., list[TrainSample]]
) -> None:
    """A buffer of 4 before 20: up to 16 tokens are free, and 20 cost the whole factor."""
    rows = make_samples(1, 5, reward=0.5)
    lengths, penalties = [1, 16, 17, 19, 20], [0.0, 0.0, -0.5, -1.5, -2.0]
    rows = [
        replace(
            row,
            response_ids=np.zeros(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            spans=(row.spans[0]._replace(num_tokens=length),),
        )
        for row, length in zip(rows, lengths, strict=True)
    ]
    keys = {"reward.overlong_buffer.len": 4, "reward.overlong_buffer.penalty_factor": 2.0}
    found = with_penalties(rows, make_config(keys))
    assert [s.penalty for s in found] == penalties
    assert [s.reward for s in found] == [0.5] * 5, "the score is as it was"
    keys = {**keys, "algorithm.adv_estimator": "rloo"}
    estimated = Estimator(make_config(keys).algorithm).assign_advantages(found)
    others = [(sum(penalties) - own) / 4 for own in penalties]
    expected = [own - other for own, other in zip(penalties, others, strict=True)]
    np.testing.assert_allclose([s.advantage for s in estimated], expected, atol=1e-12)
    assert all(s.penalty is None for s in with_penalties(rows, make_config({})))
