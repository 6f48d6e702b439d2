"""The learning rate as a function of the training step.

Reads   OptimConfig and the number of steps of the run
Gives   the rate that one training step uses; ConfigError for a schedule that cannot be followed

The schedule counts training steps, not optimizer updates: a step may have several mini-batches or
skip them all, and a rollback repeats steps. As a pure function of the step, it gives a repeated
step the same rate, without scheduler state in the checkpoint.
"""

from __future__ import annotations

import math

from laminar.config import ConfigError, OptimConfig


def check_schedule(optim: OptimConfig, total_steps: int) -> None:
    """Refuse a decay that has no end; raises ConfigError."""
    if optim.lr_scheduler_type != "constant" and total_steps <= optim.lr_warmup_steps:
        raise ConfigError(
            f"optim.lr_scheduler_type = {optim.lr_scheduler_type!r} needs more training steps than "
            f"optim.lr_warmup_steps = {optim.lr_warmup_steps}, but the run has {total_steps}; "
            "raise trainer.total_training_steps"
        )


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the rate of training step `step` (from 0) of `total_steps`.

    Warm-up over W steps: lr * (step + 1) / W, so the first step already moves. Then a linear or
    cosine decay that would reach 0 at `total_steps`; a constant schedule ignores the total.
    """
    warmup = optim.lr_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / (total_steps - warmup))
    if optim.lr_scheduler_type == "linear":
        return optim.lr * (1.0 - progress)
    return optim.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
