"""The policy losses by name, and the user's own: a function of LossInputs gives one loss per token.

Reads   [algorithm]; log-probs and advantages of a micro-batch, flat over its trained tokens
Gives   LossInputs; PolicyLoss, which the objective calls; losses [tokens] with the gradient

A loss does not know its micro-batch: coefficients, importance weights, KL and entropy belong to the
objective. So it must treat each sequence alone, and any split of a batch gives the same gradient.
At log_probs == old_log_probs every loss here has the gradient of -advantages * log_probs.

    ratio       r = exp(log_probs - old_log_probs)
    vanilla     max(-A r, -A clip(r)), for A < 0 at most -A clip_ratio_c (Ye et al. 2020)
    gspo        the same with the geometric mean of r over the sequence (2507.18071)
    cispo       -clip(r) A log_probs, clip(r) a constant (2506.13585)
    sapo        -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A (2511.20347)
    gpg         -A log_probs
    geo_mean    -A times the geometric mean of r, clipped on the side of A's sign (2507.20673)
    dppo_tv     -min(r, clip_ratio_c) A log_probs, the weight a constant, and 0 where the
                probability of the token has moved too far in A's direction (2602.04879)
    dro         -(A log_probs - beta / 2 (log r)^2) (2405.19107)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laminar.config import AlgorithmConfig, ConfigError
from laminar.config.algorithm_rules import LOSS_OPTIONS, OWN_AGGREGATION
from laminar.run.user_code import UserFunction, load_user_function
from laminar.training.algorithms.loss_terms import clamped_log_ratio, segment_sums

MAX_LOG_SEQUENCE_RATIO = 10.0  #: verl's bound for gspo


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss; tensors are [tokens] unless noted otherwise."""

    log_probs: Tensor  #: has the gradient
    old_log_probs: Tensor  #: at the start of the step; with bypass_mode those of the engine
    rollout_log_probs: Tensor  #: as the engine recorded them
    advantages: Tensor
    lengths: Tensor  #: [sequences] int64: tokens of each sequence, in the order of the tokens
    options: Mapping[str, Any]  #: clip_ratio_low, _high, _c, and algorithm.policy_loss.options
    figures: dict[str, Tensor] = field(default_factory=dict)  #: for the metrics, by name

    @cached_property
    def log_ratio(self) -> Tensor:
        """The log-ratio log(current / old), within +-20."""
        return clamped_log_ratio(self.log_probs, self.old_log_probs)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over each sequence, at each of its tokens."""
        return segment_sums(values, self.lengths)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over each sequence, at each of its tokens."""
        return self.sums(values) / self.lengths.repeat_interleave(self.lengths)

    def clipped(self, ratio: Tensor) -> Tensor:
        """Clip the ratio to within 1 - clip_ratio_low and 1 + clip_ratio_high."""
        low, high = self.options["clip_ratio_low"], self.options["clip_ratio_high"]
        return ratio.clamp(1.0 - low, 1.0 + high)


LossFunction = Callable[[LossInputs], Tensor]


def compute_vanilla_loss(batch: LossInputs) -> Tensor:
    """Compute PPO's clipped surrogate with verl's dual clip."""
    surrogate = _compute_surrogate(batch, batch.log_ratio.exp())
    ceiling = -batch.advantages * batch.options["clip_ratio_c"]
    negative = batch.advantages < 0
    batch.figures["clipped_lower"] = (surrogate > ceiling) & negative
    return torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)


def compute_gspo_loss(batch: LossInputs) -> Tensor:
    """Use the sequence's ratio as value, with the gradient of each token's own ratio."""
    own = batch.log_probs - batch.log_probs.detach()
    mean = batch.means(batch.log_probs - batch.old_log_probs).detach()
    return _compute_surrogate(batch, (own + mean).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp())


def compute_cispo_loss(batch: LossInputs) -> Tensor:
    """Compute REINFORCE with a clipped weight: no token loses its gradient."""
    ratio = batch.log_ratio.exp().detach()
    weight = batch.clipped(ratio)
    batch.figures["clipped"] = ratio != weight
    return -weight * batch.advantages * batch.log_probs


def compute_sapo_loss(batch: LossInputs) -> Tensor:
    """Apply a gate that closes smoothly, more quickly for negative advantages."""
    positive = torch.full_like(batch.advantages, batch.options["tau_pos"])
    tau = positive.where(batch.advantages > 0, batch.options["tau_neg"])
    gate = torch.sigmoid(tau * (batch.log_ratio.exp() - 1.0)) * (4.0 / tau)
    return -batch.advantages * gate


def compute_gpg_loss(batch: LossInputs) -> Tensor:
    return -batch.advantages * batch.log_probs


def geo_mean(batch: LossInputs) -> Tensor:
    """Use the token's advantage as its sequence's, which all estimators make equal."""
    log_ratio, sign = batch.log_probs - batch.old_log_probs, batch.advantages.sign()
    low, high = batch.options["clip_ratio_low"], batch.options["clip_ratio_high"]
    bounded = log_ratio.clamp(-low, high)
    batch.figures["clipped"] = log_ratio != bounded
    chosen = sign * torch.minimum(sign * log_ratio, sign * bounded)
    return -batch.advantages * batch.means(chosen).exp()


def dppo_tv(batch: LossInputs) -> Tensor:
    """Bound the difference of probabilities, not their ratio."""
    moved = (batch.log_probs.exp() - batch.old_log_probs.exp()).detach()
    within = torch.where(
        batch.advantages > 0,
        moved <= batch.options["clip_ratio_high"],
        moved >= -batch.options["clip_ratio_low"],
    )
    ratio, most = batch.log_ratio.exp().detach(), batch.options["clip_ratio_c"]
    batch.figures["clipped"] = ~within
    batch.figures["clipped_lower"] = (ratio > most) & within
    return -batch.advantages * ratio.clamp(max=most) * batch.log_probs * within


def compute_dro_loss(batch: LossInputs) -> Tensor:
    """Compute REINFORCE with a quadratic penalty on leaving the old policy, even at advantage 0."""
    moved = batch.log_probs - batch.old_log_probs
    price: Tensor = 0.5 * batch.options["dro_beta"] * moved.square()
    return price - batch.advantages * batch.log_probs


def _compute_surrogate(batch: LossInputs, ratio: Tensor) -> Tensor:
    """Return the larger of the plain and the clipped loss."""
    plain = -batch.advantages * ratio
    bounded = -batch.advantages * batch.clipped(ratio)
    batch.figures["clipped"] = bounded > plain
    return torch.maximum(plain, bounded)


POLICY_LOSSES: dict[str, LossFunction] = {
    "vanilla": compute_vanilla_loss,
    "gspo": compute_gspo_loss,
    "cispo": compute_cispo_loss,
    "sapo": compute_sapo_loss,
    "gpg": compute_gpg_loss,
    "geo_mean": geo_mean,
    "dppo_tv": dppo_tv,
    "dro": compute_dro_loss,
}
ADVANTAGE_ONLY_LOSSES = frozenset(
    {"vanilla", "gspo", "cispo", "sapo", "gpg", "geo_mean", "dppo_tv"}
)
"""Losses that are 0, with gradient 0, wherever the advantage is 0."""


class PolicyLoss:
    """The policy loss of a configuration."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Resolve the name; raises ConfigError if a function of the user cannot be loaded."""
        name = algorithm.policy_loss.loss_mode
        self.users: UserFunction | None = None
        if name not in POLICY_LOSSES:
            self.users = load_user_function("algorithm.policy_loss.loss_mode", name)
        self.aggregation = OWN_AGGREGATION.get(name, algorithm.loss_agg_mode)
        self.needs_advantage = name in ADVANTAGE_ONLY_LOSSES
        self._function: LossFunction = self.users or POLICY_LOSSES[name]
        self._options = {
            "clip_ratio_low": algorithm.clip_ratio_low,
            "clip_ratio_high": algorithm.clip_ratio_high,
            "clip_ratio_c": algorithm.clip_ratio_c,
            **LOSS_OPTIONS.get(name, {}),
            **algorithm.policy_loss.options,
        }

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        advantages: Tensor,
        lengths: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and figures [tokens]; raises ConfigError if a user's function fails."""
        batch = LossInputs(
            log_probs, old_log_probs, rollout_log_probs, advantages, lengths, self._options
        )
        losses = self._function(batch)
        if self.users is not None:
            self._check_losses(losses, log_probs)
        return losses, {"ppo_kl": -batch.log_ratio.detach(), **batch.figures}

    def _check_losses(self, losses: object, log_probs: Tensor) -> None:
        if isinstance(losses, Tensor) and losses.shape == log_probs.shape:
            return
        shape = f" of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else ""
        raise ConfigError(
            f"{self.users} returned a {type(losses).__name__}{shape}; it must return one loss for "
            f"each token, here a tensor of shape {tuple(log_probs.shape)}; the trainer reduces them"
        )
