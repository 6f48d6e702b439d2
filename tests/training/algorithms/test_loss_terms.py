"""Per-token terms and aggregation against verl's functions, written again from their formulas."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from laminar.config.algorithm import LossAggMode
from laminar.training.algorithms.loss_terms import (
    BatchCounts,
    entropy_of,
    gather_targets,
    kl_term,
    log_softmax_at,
    segment_sums,
    token_coefficients,
)


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_sums_of_a_sequence_do_not_depend_on_the_others() -> None:
    values, lengths = draw(12).float(), torch.tensor([3, 1, 8])
    together = segment_sums(values, lengths).split([3, 1, 8])
    for alone, found in zip(values.split([3, 1, 8]), together, strict=True):
        assert torch.equal(found, segment_sums(alone, torch.tensor([len(alone)])))
        assert found.tolist() == pytest.approx([alone.sum().item()] * len(alone), rel=1e-6)


def test_k3_and_k2_are_their_formulas_with_the_clamps_of_verl() -> None:
    current, reference = draw(500), draw(500, seed=1, scale=2.0)
    k3 = [min(10.0, math.exp(r - c) - (r - c) - 1) for c, r in zip(current, reference, strict=True)]
    torch.testing.assert_close(
        kl_term(current, reference, "low_var_kl"), torch.tensor(k3, dtype=torch.float64)
    )
    k2 = [(c - r) ** 2 / 2 for c, r in zip(current, reference, strict=True)]
    torch.testing.assert_close(kl_term(current, reference, "k2"), torch.stack(k2))
    assert kl_term(torch.zeros(1), torch.tensor([500.0]), "low_var_kl").item() == 10.0


def test_k1_is_refused_as_a_loss() -> None:
    with pytest.raises(ValueError, match="'k1'"):
        kl_term(torch.zeros(1), torch.zeros(1), "k1")


def verl_aggregate(mode: str, loss: Tensor, mask: Tensor, counts: BatchCounts) -> Tensor:
    """agg_loss over a padded [B, T] matrix, with the batch counts given."""
    per_sequence = (loss * mask).sum(-1)
    if mode == "token-mean":
        return per_sequence.sum() / counts.tokens
    if mode == "token-sum":
        return per_sequence.sum()
    if mode == "seq-mean-token-sum":
        return per_sequence.sum() / counts.sequences
    if mode == "seq-mean-token-mean":
        return (per_sequence / mask.sum(-1)).sum() / counts.sequences
    return per_sequence.sum() / counts.sequences / 40


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_coefficients_give_the_aggregates_of_verl(mode: str) -> None:
    lengths = torch.tensor([3, 11, 1, 7])
    mask = (torch.arange(11)[None] < lengths[:, None]).double()
    matrix = draw(4, 11)
    counts = BatchCounts(tokens=61, sequences=9)  # the rest is in other micro-batches
    flat_lengths = lengths.repeat_interleave(lengths)
    coefficients = token_coefficients(mode, flat_lengths, counts, 40)
    found = (coefficients.double() * matrix[mask.bool()]).sum()
    torch.testing.assert_close(found, verl_aggregate(mode, matrix, mask, counts), rtol=1e-6, atol=0)


def test_token_mean_of_a_split_batch_is_not_the_mean_of_means() -> None:
    """100 tokens of loss 2.0 and 900 of 0.5: 0.65, not 1.25."""
    counts = BatchCounts(tokens=1000, sequences=2)
    parts = [(100, 2.0), (900, 0.5)]
    total = sum(
        token_coefficients("token-mean", torch.full((n,), n), counts, 1).sum().item() * loss
        for n, loss in parts
    )
    assert total == pytest.approx(0.65, rel=1e-5)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'bnpo'"):
        token_coefficients("bnpo", torch.ones(1), BatchCounts(1, 1), 1)


def test_log_probs_and_entropy_are_those_of_the_tempered_distribution() -> None:
    logits = draw(5, 7).float()
    temperature = torch.tensor([0.7, 1.0, 1.3, 0.7, 2.0])
    vocabulary = log_softmax_at(logits.bfloat16(), temperature)
    assert vocabulary.dtype == torch.float32
    for row in range(5):
        weights = [math.exp(x / temperature[row]) for x in logits.bfloat16()[row].tolist()]
        p = [w / sum(weights) for w in weights]
        assert gather_targets(vocabulary, torch.full((5,), 3))[row] == pytest.approx(
            math.log(p[3]), abs=1e-5
        )
        assert entropy_of(vocabulary)[row] == pytest.approx(
            -sum(x * math.log(x) for x in p), abs=1e-5
        )
