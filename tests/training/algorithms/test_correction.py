"""Weights and masks for stale data: caps, products, IcePop, rules of rejection, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from laminar.config import Config, ConfigError
from laminar.training.algorithms.correction import Correction, compute_correction

SECTION = "algorithm.rollout_correction."
LENGTHS = torch.tensor([3, 1])
RHO = torch.tensor([4.0, 0.5, 1.0, 0.1])


@pytest.fixture
def corrected(make_config: Callable[..., Config]) -> Callable[..., Correction]:
    def build(trainer: Tensor | None = None, **keys: Any) -> Correction:
        config = make_config({SECTION + key: value for key, value in keys.items()})
        scores = RHO.log() if trainer is None else trainer
        settings = config.algorithm.rollout_correction
        return compute_correction(
            scores, torch.zeros(len(scores)), LENGTHS[: len(scores)], settings
        )

    return build


def test_a_weight_is_capped_and_a_constant(corrected: Callable[..., Correction]) -> None:
    found = corrected(RHO.log().requires_grad_())
    assert found.weight is not None
    assert not found.weight.requires_grad
    assert found.weight.tolist() == pytest.approx([2.0, 0.5, 1.0, 0.1])
    assert found.figures["is_capped"].tolist() == [True, False, False, False]
    assert found(torch.ones(4)).tolist() == pytest.approx([2.0, 0.5, 1.0, 0.1])


def test_an_extreme_ratio_stays_finite(corrected: Callable[..., Correction]) -> None:
    found = corrected(torch.tensor([1e4, -1e4, 0.0, 0.0]))
    assert found.figures["is_ratio"][0].item() == pytest.approx(math.exp(20))


def test_the_weight_of_a_sequence_is_the_product(corrected: Callable[..., Correction]) -> None:
    found = corrected(rollout_is="sequence", rollout_is_threshold=1.5)
    assert found.weight is not None
    assert found.weight.tolist() == pytest.approx([1.5, 1.5, 1.5, 0.1])


def test_outside_of_two_bounds_a_weight_is_zero(corrected: Callable[..., Correction]) -> None:
    found = corrected(rollout_is_threshold="0.5_3.0")
    assert found(torch.ones(4)).tolist() == pytest.approx([0.0, 0.5, 1.0, 0.0])
    assert found.figures["is_outside"].tolist() == [True, False, False, True]


def test_bypass_has_no_second_weight(corrected: Callable[..., Correction]) -> None:
    found = corrected(bypass_mode=True)
    assert found(torch.ones(4)).tolist() == [1.0] * 4
    assert found.figures == {}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rollout_is_threshold": "high"}, "'high' is neither a number above 0 nor two"),
        ({"rollout_is_threshold": 0.5}, "'0.5' leaves out the weight 1"),
        ({"rollout_is_threshold": "1.5_5.0"}, "leaves out the weight 1"),
        ({"rollout_is_threshold": "5.0_0.5"}, "neither a number above 0 nor two"),
        ({"rollout_rs": "seq_k1", "rollout_rs_threshold": 1}, "'seq_k1', which is none of token"),
        ({"rollout_rs": "token_k1"}, "has 0 bounds for the 1 rules"),
        ({"rollout_rs_threshold": "1"}, "has 1 bounds for the 0 rules"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "give one number"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_3"}, "give bounds around 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(
    keys: dict[str, Any], said: str, corrected: Callable[..., Correction]
) -> None:
    with pytest.raises(ConfigError, match=said):
        corrected(**keys)
