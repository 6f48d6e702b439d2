"""Learning rate by training step."""

from __future__ import annotations

import pytest

from laminar.config import ConfigError, OptimConfig
from laminar.training.schedule import check_schedule, learning_rate


def rates(kind: str, warmup: int, total: int, steps: int) -> list[float]:
    optim = OptimConfig(lr=1.0, lr_scheduler_type=kind, lr_warmup_steps=warmup)
    return [learning_rate(optim, step, total) for step in range(steps)]


def test_warm_up_moves_at_the_first_step_and_peaks_at_its_last() -> None:
    assert rates("constant", 4, 0, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_falls_evenly_and_stays_at_zero() -> None:
    assert rates("linear", 2, 6, 8) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    found = rates("cosine", 0, 4, 6)
    assert found == pytest.approx([1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("total", [0, 5])
def test_a_decay_needs_steps_after_the_warm_up(kind: str, total: int) -> None:
    optim = OptimConfig(lr_scheduler_type=kind, lr_warmup_steps=5)
    with pytest.raises(ConfigError, match="total_training_steps"):
        check_schedule(optim, total)
    check_schedule(optim, 6)
