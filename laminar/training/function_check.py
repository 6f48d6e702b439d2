"""Trial of the user's loss and estimator on synthetic data.

Reads   a message of its parent (run/child_process.py): the section [algorithm]
Gives   Ready; Refused, with one sentence on the first mistake
Raises  ConfigError for a function that cannot train

A separate process, because the user's file may hang or exit. A loss must give a sequence the same
result alone, among others, and in any order: otherwise its gradient would depend on how the memory
budget splits a batch into micro-batches.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from laminar.config import AlgorithmConfig, ConfigError
from laminar.run.child_channel import Ready
from laminar.run.child_process import connect_user_code
from laminar.training.algorithms.advantages import AdvantageInputs, Estimator
from laminar.training.algorithms.policy_losses import PolicyLoss

LENGTHS = (5, 1, 9, 3, 7, 2)
ADVANTAGES = (0.9, -1.3, 0.4, -0.2, 1.7, -0.6)
LossAndGradient = tuple[Tensor, Tensor]  #: losses and gradients of one sequence


def try_functions(algorithm: AlgorithmConfig) -> None:
    """Try the user's functions; raises ConfigError."""
    loss, estimator = PolicyLoss(algorithm), Estimator(algorithm)
    if loss.users is not None:
        _try_loss(loss)
    if estimator.users is not None:
        _try_estimator(estimator)


def _try_loss(loss: PolicyLoss) -> None:
    order = list(range(len(LENGTHS)))
    together = _compute_losses(loss, order)
    if not any(gradient.any() for _, gradient in together):
        raise ConfigError(
            f"{loss.users} returned losses with zero gradient in batch.log_probs; the loss must "
            "depend on them, since they are trained"
        )
    alone = [_compute_losses(loss, [row])[0] for row in order]
    _require_same(loss, "alone", alone, together)
    _require_same(loss, "in another order", _compute_losses(loss, order[::-1])[::-1], together)


def _require_same(
    loss: PolicyLoss, how: str, found: list[LossAndGradient], together: list[LossAndGradient]
) -> None:
    for here, there in zip(found, together, strict=True):
        for figure, mine, others in zip(("losses", "gradients"), here, there, strict=True):
            if not torch.allclose(mine, others, rtol=1e-4, atol=1e-5):  # float32 sums
                raise ConfigError(
                    f"{loss.users} gives a sequence different {figure} {how} "
                    f"({_format_values(mine)}) than among others ({_format_values(others)}); it "
                    "must treat each sequence alone (batch.sums, batch.means), or training would "
                    "depend on how a batch is split into micro-batches"
                )


def _compute_losses(loss: PolicyLoss, rows: list[int]) -> list[LossAndGradient]:
    """Return losses and gradients of each of these sequences, given as one micro-batch."""
    drawn = [_draw_inputs(row) for row in rows]
    old, moved, engine, weights = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    log_probs = (old + moved).clamp(max=-1e-3).requires_grad_()
    counts = [LENGTHS[row] for row in rows]
    lengths = torch.tensor(counts)
    advantages = torch.tensor([ADVANTAGES[row] for row in rows]).repeat_interleave(lengths)
    found, _ = loss(log_probs, old, engine, advantages, lengths)
    if not torch.isfinite(found.detach()).all():
        bad = found.detach()[~torch.isfinite(found.detach())][0]
        raise ConfigError(f"{loss.users} returned {bad:g} among its losses; they must be finite")
    if not found.requires_grad:
        raise ConfigError(
            f"{loss.users} returned losses without a gradient; compute them from batch.log_probs, "
            "without .detach(), .item() or numpy"
        )
    (gradient,) = torch.autograd.grad((weights * found).sum(), log_probs, allow_unused=True)
    gradient = torch.zeros_like(old) if gradient is None else gradient
    if not torch.isfinite(gradient).all():
        raise ConfigError(f"{loss.users} returned losses with a non-finite gradient")
    parts = zip(found.detach().split(counts), gradient.split(counts), strict=True)
    return list(parts)


def _draw_inputs(row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw for one sequence: old log-probs, their change, the engine's log-probs, loss weights."""
    generator = torch.Generator().manual_seed(row)
    old = -3.0 * torch.rand(LENGTHS[row], generator=generator) - 0.01
    moved, engine = 0.3 * torch.randn(2, LENGTHS[row], generator=generator)
    weights = torch.rand(LENGTHS[row], generator=generator)
    return old, moved, (old + 0.1 * engine).clamp(max=-1e-3), weights


def _try_estimator(estimator: Estimator) -> None:
    """Try three groups: of different rewards, of equal ones, and of one sequence."""
    lengths = np.array([*LENGTHS, 4])
    batch = AdvantageInputs(
        rewards=np.array([1.0, 0.0, 0.3, 1.0, 1.0, 1.0, 0.5]),
        groups=np.array([0, 0, 0, 1, 1, 1, 2]),
        lengths=lengths,
        extras=defaultdict(lambda: np.linspace(0.0, 1.0, len(lengths))),  # any name
        options=estimator.options,
    )
    estimator.estimate_advantages(batch)


def _format_values(values: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:3].tolist())


def main(fd: str, parent: str) -> None:
    channel = connect_user_code(fd, parent)
    if (algorithm := channel.receive(AlgorithmConfig)) is not None:
        with channel.refuse_errors():
            try_functions(algorithm)
        channel.send_last(Ready())


if __name__ == "__main__":
    main(*sys.argv[1:])
