"""Value clipping, dual clip and rejection against a plain computation, over random batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from laminar.config import Config
from laminar.config.algorithm_rules import REJECTIONS
from laminar.training.algorithms.correction import compute_correction
from laminar.training.algorithms.loss_terms import value_losses
from laminar.training.algorithms.policy_losses import PolicyLoss
from tests.training.plain_terms import plain_kept, plain_value_loss, plain_vanilla_loss

Make = Callable[..., Config]
SECTION = "algorithm.rollout_correction."


@pytest.mark.parametrize("limit", [0.05, 0.5, 3.0])
def test_value_and_derivative_of_the_clipped_value_loss(limit: float) -> None:
    """A value may leave its bounds on either side, towards the return or away from it."""
    rng, cases = np.random.default_rng(0), Counter[tuple[bool, bool]]()
    for _ in range(20):
        given = torch.tensor(rng.normal(scale=1.5, size=(3, 40)))
        values, before, wanted = given[0].clone().requires_grad_(), given[1], given[2]
        losses, clipped = value_losses(values, before, wanted, limit)
        (derivative,) = torch.autograd.grad(losses.sum(), values)
        losses = losses.detach()
        for i, numbers in enumerate(given.T.tolist()):
            loss, slope, held = plain_value_loss(*numbers, limit)
            assert float(losses[i]) == pytest.approx(loss, rel=1e-12)
            assert float(derivative[i]) == pytest.approx(slope, rel=1e-12)
            assert bool(clipped[i]) == held
            cases[numbers[0] > numbers[1], held] += 1
    assert len(cases) == 4 and min(cases.values()) > 5


@pytest.mark.parametrize("ceiling", [1.5, 3.0])
def test_value_and_derivative_of_the_dual_clip_on_both_signs(
    ceiling: float, make_config: Make
) -> None:
    keys = {"algorithm.clip_ratio_low": 0.3, "algorithm.clip_ratio_high": 0.25}
    loss = PolicyLoss(make_config({**keys, "algorithm.clip_ratio_c": ceiling}).algorithm)
    rng, cases = np.random.default_rng(1), Counter[tuple[bool, str]]()
    for _ in range(20):
        moved, worth, old = torch.tensor(rng.normal(size=(3, 40)))
        log_probs = (old + moved).requires_grad_()
        losses, figures = loss(log_probs, old, old, worth, torch.tensor([40]))
        (derivative,) = torch.autograd.grad(losses.sum(), log_probs)
        losses = losses.detach()
        for i, (by, advantage) in enumerate(zip(moved.tolist(), worth.tolist(), strict=True)):
            ratio = math.exp(by)
            expected, slope, decides = plain_vanilla_loss(ratio, advantage, 0.3, 0.25, ceiling)
            assert float(losses[i]) == pytest.approx(expected, rel=1e-9)
            assert float(derivative[i]) == pytest.approx(slope, rel=1e-9)
            for name in ("clipped", "clipped_lower"):
                assert bool(figures[name][i]) == (decides == name)
            cases[advantage > 0, decides] += 1
    assert len(cases) == 5 and min(cases.values()) > 5  # only a loss above 0 has a ceiling


BOUNDS = {"token_k1": "0.7_1.3", "seq_sum_k1": "0.6_1.9", "seq_mean_k1": "0.93_1.1"}
RULES = [*REJECTIONS, "token_k1,seq_mean_k3"]


@pytest.mark.parametrize("weights", ["none", "token", "sequence"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rejection_masks_the_loss_of_what_it_covers_and_nothing_else(
    rule: str, weights: str, make_config: Make
) -> None:
    """Whatever the weight and the loss of a masked token, neither it nor its gradient is left."""
    rules = [(part, BOUNDS.get(part, "0.05")) for part in rule.split(",")]
    bounds = ",".join(bound for _, bound in rules)
    keys = {"rollout_rs": rule, "rollout_rs_threshold": bounds, "rollout_is": weights}
    settings = make_config({SECTION + key: value for key, value in keys.items()}).algorithm
    rng, found = np.random.default_rng(2), Counter[bool]()
    for _ in range(30):
        counts = rng.integers(1, 9, 4)
        trainer, behaviour = torch.tensor(rng.normal(scale=0.2, size=(2, int(counts.sum()))))
        lengths = torch.tensor(counts)
        correction = compute_correction(trainer, behaviour, lengths, settings.rollout_correction)
        flat = list[bool]()
        for row in (trainer - behaviour).split(counts.tolist()):
            flat += map(
                all, zip(*(plain_kept(*given, row.tolist()) for given in rules), strict=True)
            )
        losses = torch.tensor(rng.normal(size=len(flat)), requires_grad=True)
        (derivative,) = torch.autograd.grad(correction(losses).sum(), losses)
        masked, unmasked = (each(losses) for each in (correction, replace(correction, keep=None)))
        assert masked.tolist() == [a * b for a, b in zip(unmasked.tolist(), flat, strict=True)]
        assert [slope != 0.0 for slope in derivative.tolist()] == flat
        assert correction.figures["rs_masked"].tolist() == [not one for one in flat]
        found.update(flat)
    assert min(found[True], found[False]) > 20
