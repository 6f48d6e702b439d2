"""The objective of one micro-batch: policy loss, correction for stale data, KL and entropy.

Reads   a MicroBatch, the policy, the reference, proximal log-probs and the mini-batch's counts
Gives   Objective: loss, its two reported parts, per-token figures; the gradient of a mini-batch

Three distributions meet here (decoupled PPO, Hilton et al. 2022). The behaviour policy sampled the
tokens; the proximal policy is the trainer's score with the weights at the start of the step; the
current policy changes. The ratio current / proximal is clipped; the weight proximal / behaviour is
capped and constant. In bypass mode the proximal policy is the behaviour policy, and there is no
weight: the ratio already contains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laminar.config import AlgorithmConfig, Config
from laminar.training.algorithms.correction import compute_correction
from laminar.training.algorithms.loss_terms import (
    BatchCounts,
    clamped_log_ratio,
    kl_term,
    token_coefficients,
)
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.engine_mismatch import compute_doubts
from laminar.training.metrics import TokenFigures
from laminar.training.model.experts import RouterLoad
from laminar.training.model.micro_batches import MicroBatch
from laminar.training.model.policy import BasePolicy, Compute, LoadedPolicy
from laminar.training.step_batch import MiniBatch


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    algorithm: AlgorithmConfig
    policy_loss: PolicyLoss
    max_response_length: int
    compute: Compute
    router_load: RouterLoad = field(default_factory=RouterLoad)

    @property
    def reads_all(self) -> bool:
        """Whether a term other than its advantage may give a sample a gradient."""
        other_terms = self.algorithm.use_kl_loss or self.algorithm.entropy_coeff != 0
        return other_terms or not self.policy_loss.needs_advantage


def make_objective_config(config: Config, compute: Compute, model: nn.Module) -> ObjectiveConfig:
    """Return the settings of a run's loss, for a model whose experts are counted."""
    loss, response_max = PolicyLoss(config.algorithm), config.data.max_response_length
    return ObjectiveConfig(config.algorithm, loss, response_max, compute, RouterLoad(model))


@dataclass(frozen=True, slots=True)
class Objective:
    """Sums over a micro-batch with the mini-batch's coefficients, so that micro-batches add up."""

    loss: Tensor  #: scalar with gradient
    pg_loss: Tensor  #: scalar: the policy term alone
    kl_loss: Tensor | None  #: scalar, before its coefficient; None without a KL term
    figures: dict[str, Tensor]  #: name -> [tokens], for the metrics
    scores: Tensor  #: [tokens], constant: log-probs at the start of the step


@torch.no_grad()
def score_micro_batch(
    policy: LoadedPolicy | BasePolicy, micro: MicroBatch, compute: Compute
) -> Tensor:
    """Return log-probs [tokens] of the sampled tokens at their sampling temperature."""
    return policy.log_probs(micro.rows, micro.temperature, compute).log_probs


def compute_objective(
    policy: LoadedPolicy,
    reference: LoadedPolicy | BasePolicy | None,
    micro: MicroBatch,
    proximal: Tensor | None,
    counts: BatchCounts,
    config: ObjectiveConfig,
) -> Objective:
    """Compute the loss of one micro-batch; `proximal` None: the policy's own detached score.

    That is exact, and free, if the mini-batch is the first of its step.
    """
    algorithm = config.algorithm
    # Before the policy's pass: they may share a model, whose state must be as that pass leaves it.
    anchor = None if reference is None else score_micro_batch(reference, micro, config.compute)
    log_probs, entropy = policy.log_probs(
        micro.rows,
        micro.temperature,
        config.compute,
        "gradient" if algorithm.entropy_coeff else "value",
    )
    trainer = log_probs.detach() if proximal is None else proximal

    losses, figures = _policy_losses(log_probs, trainer, micro, config)
    figures |= compare_scores(trainer, micro.behaviour)
    figures["entropy"] = entropy.detach()

    coefficients = token_coefficients(
        config.policy_loss.aggregation, micro.lengths, counts, config.max_response_length
    )
    if micro.empty:
        coefficients = torch.zeros_like(coefficients)
    pg_loss = (coefficients * losses).sum()
    loss = pg_loss - algorithm.entropy_coeff * (coefficients * entropy).sum()
    kl_loss = None
    if anchor is not None:
        kl_loss = (coefficients * kl_term(log_probs, anchor, algorithm.kl_loss_type)).sum()
        loss = loss + algorithm.kl_loss_coef * kl_loss
        kl_loss = kl_loss.detach()
    return Objective(loss, pg_loss.detach(), kl_loss, figures, trainer)


def accumulate_gradient(
    policy: LoadedPolicy,
    reference: LoadedPolicy | BasePolicy | None,
    mini: MiniBatch,
    config: ObjectiveConfig,
    figures: TokenFigures,
) -> Tensor:
    """Run this rank's passes, backward if with a gradient; return both losses, set `proximal`."""
    scores, losses = [], torch.zeros(2, dtype=torch.float64)
    for i, micro in enumerate(mini.passes):
        proximal = mini.proximal[i] if mini.proximal else None
        counted = config.router_load.count_pass(micro)
        with counted, torch.set_grad_enabled(i < mini.gradient_passes):
            found = compute_objective(policy, reference, micro, proximal, mini.counts, config)
        if i < mini.gradient_passes:
            policy.run_backward(found.loss, last=i == mini.gradient_passes - 1)
        scores.append(found.scores)
        figures.add(micro, found.figures)
        kl_loss = 0.0 if found.kl_loss is None else float(found.kl_loss)
        losses += torch.tensor([float(found.pg_loss), kl_loss], dtype=torch.float64)
    mini.proximal = scores
    return losses


def _policy_losses(
    log_probs: Tensor, trainer: Tensor, micro: MicroBatch, config: ObjectiveConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return corrected per-token policy losses [tokens], and figures of clip and correction."""
    settings = config.algorithm.rollout_correction
    losses, figures = config.policy_loss(
        log_probs,
        micro.behaviour if settings.bypass_mode else trainer,
        micro.behaviour,
        micro.advantages,
        micro.sequence_lengths,
    )
    found = compute_correction(trainer, micro.behaviour, micro.sequence_lengths, settings)
    return found(losses), figures | found.figures


def compare_scores(trainer: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
    """Return per-token differences between the trainer's score and what the engine recorded.

    On stale data this contains the policy's movement since the tokens were sampled.
    """
    log_ratio = clamped_log_ratio(trainer, behaviour)
    return {
        "abs_diff": (trainer - behaviour).abs(),
        "mismatch_kl": log_ratio.exp() - 1.0 - log_ratio,
        "doubt": compute_doubts(behaviour),
    }
