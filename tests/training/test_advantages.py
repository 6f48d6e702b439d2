"""Group-relative advantages: constant groups, estimators, and what is refused."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from laminar.training.advantages import group_advantages


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(size: int, reward: float, estimator: str) -> None:
    found = group_advantages([reward] * size, estimator=estimator, norm_by_std=True)
    assert found.dtype == np.float64
    assert found.tolist() == [0.0] * size


def test_spread_at_the_limit_is_constant_and_beyond_it_is_not() -> None:
    close = group_advantages([0.0, 1e-6], estimator="grpo", norm_by_std=True)
    apart = group_advantages([0.0, 2e-6], estimator="grpo", norm_by_std=True)
    assert close.tolist() == [0.0, 0.0]
    assert apart[1] > 0.1


def test_grpo_uses_the_sample_deviation_and_the_epsilon_of_verl() -> None:
    rewards = [0.0, 0.25, 1.0, 0.5, 0.0]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (std + 1e-6) for r in rewards]
    found = group_advantages(rewards, estimator="grpo", norm_by_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_without_std_only_the_mean_is_taken_off() -> None:
    found = group_advantages([1.0, 0.0, 0.0, 0.0], estimator="grpo", norm_by_std=False)
    np.testing.assert_allclose(found, [0.75, -0.25, -0.25, -0.25], rtol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_rloo_is_the_mean_of_the_others_and_scaled_dr_grpo(size: int) -> None:
    rewards = np.random.default_rng(size).random(size).tolist()
    rloo = group_advantages(rewards, estimator="rloo", norm_by_std=True)
    others = [r - (sum(rewards) - r) / (size - 1) for r in rewards]
    plain = group_advantages(rewards, estimator="grpo", norm_by_std=False)
    np.testing.assert_allclose(rloo, others, rtol=1e-10)
    np.testing.assert_allclose(rloo, size / (size - 1) * plain, rtol=1e-10)


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not all finite"):
        group_advantages([1.0, float("nan")], estimator="grpo", norm_by_std=True)


def test_an_unknown_estimator_is_refused_even_for_a_constant_group() -> None:
    with pytest.raises(ValueError, match="'gae'"):
        group_advantages([1.0, 1.0], estimator="gae", norm_by_std=True)
