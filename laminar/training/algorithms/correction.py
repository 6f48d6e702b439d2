"""The correction for data that the present weights would not sample: weights and masks.

Reads   log-probs of trainer and engine of a micro-batch, flat; algorithm.rollout_correction
Gives   Correction: a weight for each token, 0 for a masked one, and figures

rho = trainer / engine. A weight is min(rho, C) of the token, or of the product over its sequence;
with a lower bound, too, it is rho inside both and 0 outside (IcePop). `rollout_rs` masks tokens or
whole sequences by k1 = -log rho, k2 = k1^2 / 2 or k3 = rho - 1 - log rho, with verl's names and
bounds. Masked tokens give no gradient of the policy loss and stay in all counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.config.algorithm import RolloutCorrectionConfig
from laminar.config.algorithm_rules import parse_rejections, weight_bounds
from laminar.training.algorithms.loss_terms import MAX_LOG_RATIO, clamped_log_ratio, segment_sums


@dataclass(frozen=True, slots=True)
class Correction:
    weight: Tensor | None  #: [tokens]; None: 1
    keep: Tensor | None  #: [tokens] bool; None: nothing is masked
    figures: dict[str, Tensor]  #: for the metrics, by name

    def __call__(self, losses: Tensor) -> Tensor:
        if self.weight is not None:
            losses = losses * self.weight
        return losses if self.keep is None else torch.where(self.keep, losses, 0.0)


@torch.no_grad()
def compute_correction(
    trainer: Tensor, behaviour: Tensor, lengths: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Compute weights and mask; bypass mode has no weights: its ratio is to the engine's policy."""
    figures: dict[str, Tensor] = {}
    weight = keep = None
    if not config.bypass_mode and config.rollout_is != "none":
        weight = _compute_weight(trainer, behaviour, lengths, config, figures)
    for kind, low, high in parse_rejections(config):
        passes = _build_keep_mask(kind, low, high, clamped_log_ratio(trainer, behaviour), lengths)
        keep = passes if keep is None else keep & passes
    if keep is not None:
        figures["rs_masked"] = ~keep
    return Correction(weight, keep, figures)


def _compute_weight(
    trainer: Tensor,
    behaviour: Tensor,
    lengths: Tensor,
    config: RolloutCorrectionConfig,
    figures: dict[str, Tensor],
) -> Tensor:
    log_ratio = trainer - behaviour
    if config.rollout_is == "sequence":
        log_ratio = segment_sums(log_ratio, lengths)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = weight_bounds(config)
    if low:
        outside = (ratio < low) | (ratio > high)
        figures["is_outside"] = outside
        weight = torch.where(outside, 0.0, ratio)
    else:
        weight = ratio.clamp(max=high)
        figures["is_capped"] = ratio > weight
    figures |= {"is_ratio": ratio, "is_weight": weight}
    return weight


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: log_ratio.exp() - 1.0 - log_ratio,
}


def _build_keep_mask(
    kind: str, low: float, high: float, log_ratio: Tensor, lengths: Tensor
) -> Tensor:
    """Return which tokens stay, [tokens] bool, by one rule such as seq_mean_k3."""
    level, _, estimate = kind.rpartition("_")
    values = KL_ESTIMATORS[estimate](log_ratio)
    if level == "seq_max":
        values = segment_sums((values > high).to(values), lengths)
        return values == 0
    if level.startswith("seq"):
        values = segment_sums(values, lengths)
    if level == "seq_mean":
        values = values / lengths.repeat_interleave(lengths)
    if estimate == "k1":
        return (values >= math.log(low)) & (values <= math.log(high))
    return values <= high
