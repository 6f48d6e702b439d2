"""Per-token terms and aggregation against verl's functions, written again from their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laminar.training.algorithms import loss_terms


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_sums_of_a_sequence_do_not_depend_on_the_others() -> None:
    values, lengths = draw(12).float(), torch.tensor([3, 1, 8])
    together = loss_terms.segment_sums(values, lengths).split([3, 1, 8])
    for alone, found in zip(values.split([3, 1, 8]), together, strict=True):
        assert torch.equal(found, loss_terms.segment_sums(alone, torch.tensor([len(alone)])))
        assert found.tolist() == pytest.approx([alone.sum().item()] * len(alone), rel=1e-6)


def test_k1_is_refused_as_a_loss() -> None:
    with pytest.raises(ValueError, match="'k1'"):
        loss_terms.kl_term(torch.zeros(1), torch.zeros(1), "k1")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'bnpo'"):
        loss_terms.token_coefficients("bnpo", torch.ones(1), loss_terms.BatchCounts(1, 1), 1)


def test_log_probs_and_entropy_are_those_of_the_tempered_distribution() -> None:
    logits = draw(5, 7).float()
    temperature = torch.tensor([0.7, 1.0, 1.3, 0.7, 2.0])
    vocabulary = loss_terms.log_softmax_at(logits.bfloat16(), temperature)
    assert vocabulary.dtype == torch.float32
    for row in range(5):
        weights = [math.exp(x / temperature[row]) for x in logits.bfloat16()[row].tolist()]
        p = [w / sum(weights) for w in weights]
        assert loss_terms.gather_targets(vocabulary, torch.full((5,), 3))[row] == pytest.approx(
            math.log(p[3]), abs=1e-5
        )
        assert loss_terms.entropy_of(vocabulary)[row] == pytest.approx(
            -sum(x * math.log(x) for x in p), abs=1e-5
        )
