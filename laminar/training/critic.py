"""The critic of PPO: values of the tokens of a batch, and their own training step.

Reads   TrainSamples; [critic], algorithm.gamma
Gives   Critic: samples with values, metrics; changes the critic's weights and optimizer in place

The value of a token is what the critic expects of the state before it. It is read where the policy
reads the token's log-prob, so the first one is that of the whole prompt, and none knows its own
token. The critic is trained on returns R_t = A_t + V_t, in which A_t has a separate lambda
(critic.lam); with gamma = lambda = 1 that is the reward. The values before the step are read once,
for advantages and returns alike; the loss clips a value to within cliprange_value of them (verl's).
Like the policy's, it is a sum over tokens with coefficients of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from laminar.config import Config
from laminar.training.algorithms.advantages import Floats, inputs_of, later_errors
from laminar.training.algorithms.loss_terms import BatchCounts, token_coefficients, value_losses
from laminar.training.metrics import count_skipped
from laminar.training.model.micro_batches import MicroBatch, mini_batches, select_unmasked
from laminar.training.model.packing import gather_tokens, make_pass_builder
from laminar.training.model.policy import Compute, LoadedPolicy
from laminar.training.optimizer import apply_gradient, make_adamw, set_rate
from laminar.training.ranks import SINGLE_RANK, Ranks
from laminar.training.schedule import learning_rate
from laminar.training.steps import TrainSample

Returns = dict[str, Floats]
"""Returns by sample id, for each token of the response."""


class Critic:
    """The critic's model and its optimizer."""

    def __init__(
        self,
        config: Config,
        model: LoadedPolicy,
        compute: Compute,
        total_steps: int = 0,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        """Set the critic up; `model`: from `policy.load_critic`."""
        self.config, self.model, self.ranks = config, model, ranks
        self._optim = msgspec.structs.replace(config.optim, lr=config.critic.lr)
        self.optimizer = make_adamw(self._optim, model.model)
        self._compute, self._total_steps = compute, total_steps
        self._build_passes = make_pass_builder(config, model, compute, ranks)

    @torch.no_grad()
    def assign_values(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Return the samples in their order, each with the present values of its tokens."""
        passes = self._build_passes(samples)
        found = ((micro, self.model.values(micro.rows, self._compute)) for micro in passes)
        flat = gather_tokens(samples, found, self.ranks).numpy()
        values = np.split(flat, np.cumsum([len(s.response_ids) for s in samples])[:-1])
        return [replace(s, values=own) for s, own in zip(samples, values, strict=True)]

    def train_step(self, samples: Sequence[TrainSample], index: int) -> dict[str, float]:
        """Train on a batch of samples with values as training step `index`; return metrics.

        A masked sequence counts, but is not trained on.
        """
        rate = learning_rate(self._optim, index, self._total_steps)
        set_rate(self.optimizer, rate)
        returns = returns_of(samples, self.config)
        minis = mini_batches(samples, self.config.mini_batch_groups)
        updates = [self._update(mini, returns) for mini in minis]
        self.optimizer.zero_grad(set_to_none=True)
        sums = np.sum([figures for figures, _, _ in updates], axis=0)
        tokens = max(sums[3], 1.0)
        return {
            "critic/vf_loss": float(sums[0] / len(minis)),
            "critic/vf_clipfrac": float(sums[1] / tokens),
            "critic/vpred_mean": float(sums[2] / tokens),
            "critic/explained_variance": explained_variance(samples, returns),
            "critic/grad_norm": float(np.mean([norm for _, norm, _ in updates])),
            **count_skipped("critic", [reason for _, _, reason in updates]),
            "critic/lr": rate,
        }

    def _update(
        self, samples: Sequence[TrainSample], returns: Returns
    ) -> tuple[Floats, float, str | None]:
        """Update on one mini-batch; return sums, the gradient's norm, and the reason if skipped.

        The sums are those of losses, clipped values, values and tokens."""
        algorithm, sums = self.config.algorithm, torch.zeros(4, dtype=torch.float64)
        counts = BatchCounts.from_samples(samples)
        unmasked = select_unmasked(samples, algorithm.truncated)
        before = {s.sample_id: s.values for s in unmasked}
        self.optimizer.zero_grad(set_to_none=True)
        passes = self._build_passes(unmasked)
        for i, micro in enumerate(passes):
            values = self.model.values(micro.rows, self._compute)
            losses, clipped = value_losses(
                values,
                _flatten_values(micro, before, values.device),
                _flatten_values(micro, returns, values.device),
                self.config.critic.cliprange_value,
            )
            coefficients = token_coefficients(
                algorithm.loss_agg_mode, micro.lengths, counts, self.config.data.max_response_length
            ) * (not micro.empty)
            loss = (coefficients * losses).sum()
            self.model.run_backward(loss, last=i == len(passes) - 1)
            if not micro.empty:
                figures = (loss.detach(), clipped.sum(), values.detach().sum(), len(losses))
                sums += torch.tensor([float(figure) for figure in figures], dtype=torch.float64)
        norm, reason = apply_gradient(self.optimizer, self.model.model, self.config.optim.clip_grad)
        return self.ranks.all_reduce(sums).numpy(), norm, reason


def returns_of(samples: Sequence[TrainSample], config: Config) -> Returns:
    inputs = inputs_of(samples, {"gamma": config.algorithm.gamma})
    assert inputs.values is not None
    found = later_errors(inputs, config.critic.lam) + inputs.values
    parts = np.split(found, np.cumsum(inputs.lengths)[:-1])
    return {s.sample_id: part for s, part in zip(samples, parts, strict=True)}


def _flatten_values(
    micro: MicroBatch, of: Mapping[str, Floats | None], device: torch.device
) -> Tensor:
    """Return the values of a pass, flat, [tokens] float32."""
    flat = np.concatenate([of[sample_id] for sample_id in micro.sample_ids])
    return torch.from_numpy(flat.astype(np.float32)).to(device)


def explained_variance(samples: Sequence[TrainSample], returns: Returns) -> float:
    """Return the share of the returns' variance that the values before the step explain.

    1 at best, 0 for a constant; 0 where the returns do not vary."""
    values = np.concatenate([s.values for s in samples])
    wanted = np.concatenate([returns[s.sample_id] for s in samples])
    variance = wanted.var()
    return float(1.0 - (wanted - values).var() / variance) if variance > 0 else 0.0
