"""AdamW for all models of a trainer: construction, and steps unless the gradient forbids them.

Reads   [optim]; gradients
Writes  parameters and the optimizer's state, in place
Gives   `make_adamw`, `set_rate`, `apply_gradient`
"""

from __future__ import annotations

import math

import torch
from torch import nn

from laminar.config import OptimConfig
from laminar.training.steps import NO_SIGNAL, NON_FINITE


def make_adamw(optim: OptimConfig, model: nn.Module) -> torch.optim.AdamW:
    """Make a fused AdamW: no memory beyond the moments, and on a CPU a sixth of the time."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def apply_gradient(
    optimizer: torch.optim.Optimizer, model: nn.Module, clip_grad: float
) -> tuple[float, str | None]:
    """Clip the gradient and update; return its norm before, and the reason if it was skipped.

    `clip_grad`: 0 switches clipping off."""
    limit = clip_grad or math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
    reason = NON_FINITE if not math.isfinite(norm) else None if norm else NO_SIGNAL
    if reason is None:
        optimizer.step()
    return norm, reason
