"""Per-token terms of the objective and the coefficients that sum them.

Reads   flat tensors over the trained tokens of a micro-batch, all of shape [tokens], float32
Gives   flat tensors of the same shape; the learner forms sum(coefficient * term)

Every aggregation mode is a fixed coefficient per token, made from counts of the whole mini-batch.
A plain sum over tokens cannot depend on how the tokens were split into micro-batches, and leaves no
place where a micro-batch could be averaged by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.training.steps import TrainSample

MAX_LOG_RATIO = 20.0  #: exp(20) is 5e8: beyond it a ratio would soon overflow
MAX_KL = 10.0  #: verl's bound on the k3 estimate of one token


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Size of one optimizer update, masked sequences included."""

    tokens: int  #: response tokens
    sequences: int

    @classmethod
    def from_samples(cls, samples: Sequence[TrainSample]) -> BatchCounts:
        return cls(sum(len(s.response_ids) for s in samples), len(samples))


def log_softmax_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log-probs [tokens, vocab] float32 of the distribution that was sampled from.

    logits [tokens, vocab] of any float type, temperature [tokens] float32.
    """
    return torch.log_softmax(logits.float() / temperature[:, None], dim=-1)


def gather_targets(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Gather log_probs [tokens, vocab] at targets [tokens] int64; the result is [tokens]."""
    return log_probs.gather(-1, targets[:, None]).squeeze(-1)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats, [tokens], of log-probs [tokens, vocab]."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def clamped_log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return each sequence's sum at each of its tokens; values [tokens], lengths [sequences].

    Summed in the order of the tokens, so that it does not depend on the other sequences.
    """
    sums = torch.segment_reduce(values, "sum", lengths=lengths)
    return sums.repeat_interleave(lengths, output_size=len(values))


def kl_term(log_probs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token (Schulman 2020, "Approximating KL").

    low_var_kl is k3 = exp(-x) - 1 + x with x = log(policy / reference), with verl's clamps; k2 is
    x^2 / 2. k1 = x is refused: as a loss on the policy's own samples its expected gradient is 0.
    """
    if kind == "k2":
        return 0.5 * (log_probs - reference).square()
    if kind == "low_var_kl":
        log_ratio = clamped_log_ratio(reference, log_probs)
        return (log_ratio.exp() - log_ratio - 1.0).clamp(-MAX_KL, MAX_KL)
    raise ValueError(f"KL loss type {kind!r} is not one of low_var_kl, k2")


def value_losses(
    values: Tensor, before: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of a critic's values, and whether it was clipped, as [tokens].

    The larger of two errors: of the value, and of the value clipped to within `cliprange` of
    `before` the step. A value that moved further has no gradient away from there.
    """
    held = torch.maximum(torch.minimum(values, before + cliprange), before - cliprange)
    free, limited = (values - returns).square(), (held - returns).square()
    return 0.5 * torch.maximum(free, limited), (limited > free).float().detach()


def token_coefficients(
    mode: str, lengths: Tensor, counts: BatchCounts, max_response_length: int
) -> Tensor:
    """Return the coefficient of every token, [tokens] float32, for one `loss_agg_mode`.

    `lengths` [tokens] is the response length of the sequence that the token belongs to; `counts`
    are those of the whole mini-batch. Summed with these the per-token losses give

    token-mean: sum / N; token-sum: sum; seq-mean-token-sum: sum / B; seq-mean-token-mean: mean over
    sequences of the mean over their tokens; seq-mean-token-sum-norm: sum / B / max_response_length.
    """
    lengths = lengths.float()
    ones = torch.ones_like(lengths)
    if mode == "token-mean":
        return ones / counts.tokens
    if mode == "token-sum":
        return ones
    if mode == "seq-mean-token-sum":
        return ones / counts.sequences
    if mode == "seq-mean-token-mean":
        return 1.0 / (lengths * counts.sequences)
    if mode == "seq-mean-token-sum-norm":
        return ones / (counts.sequences * max_response_length)
    raise ValueError(f"loss_agg_mode {mode!r} is unknown")
