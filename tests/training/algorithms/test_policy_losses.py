"""The policy losses by name: their formulas, their gradients, and what they may look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laminar.config import Config, ConfigError
from laminar.training.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss

Make = Callable[..., Config]


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture
def make_loss(make_config: Make) -> Callable[..., PolicyLoss]:
    def build(name: str = "vanilla", **options: Any) -> PolicyLoss:
        keys = {
            "algorithm.policy_loss.loss_mode": name,
            "algorithm.policy_loss.options": {"dro_beta": 0.3} if name == "dro" else options,
        }
        return PolicyLoss(make_config(keys).algorithm)

    return build


def called(
    loss: PolicyLoss, log_probs: Tensor, old: Tensor, advantages: Tensor, lengths: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss(log_probs, old, old, advantages, torch.tensor(lengths))


def of_tokens(
    loss: PolicyLoss, log_probs: Tensor, old: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """All tokens as one sequence."""
    return called(loss, log_probs, old, advantages, [len(log_probs)])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_without_movement_each_has_the_gradient_of_reinforce(
    name: str, make_loss: Callable[..., PolicyLoss]
) -> None:
    lengths = [4, 1, 7, 3]
    log_probs = draw(15).requires_grad_()
    advantages = draw(4, seed=1).repeat_interleave(torch.tensor(lengths))
    losses, _ = called(make_loss(name), log_probs, log_probs.detach(), advantages, lengths)
    losses.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_sequence_has_the_same_losses_and_gradients_in_any_micro_batch(
    name: str, make_loss: Callable[..., PolicyLoss]
) -> None:
    lengths = [4, 1, 7, 3]
    old, moved = draw(15), draw(15, scale=0.4, seed=1)
    advantages = draw(4, seed=2).repeat_interleave(torch.tensor(lengths))
    loss, found = make_loss(name), []
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        parts = [t.split(lengths) for t in (old, moved, advantages)]
        was, by, worth = (torch.cat([part[i] for i in order]) for part in parts)
        log_probs = (was + by).requires_grad_()
        counts = [lengths[i] for i in order]
        losses, _ = called(loss, log_probs, was, worth, counts)
        (gradient,) = torch.autograd.grad((losses * by).sum(), log_probs)
        rows = zip(losses.detach().split(counts), gradient.split(counts), strict=True)
        found.append(dict(zip(order, rows, strict=True)))
    for row in range(4):
        for one, other in zip(found[0][row], found[1][row], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_cispo_keeps_the_gradient_of_a_clipped_token(make_loss: Callable[..., PolicyLoss]) -> None:
    log_probs = torch.tensor([1.5, 0.5, 1.1]).log().requires_grad_()
    losses, figures = of_tokens(make_loss("cispo"), log_probs, torch.zeros(3), torch.ones(3))
    losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.28, -0.8, -1.1])
    assert figures["clipped"].tolist() == [True, True, False]


def test_dppo_stops_a_token_whose_probability_has_moved_too_far(
    make_loss: Callable[..., PolicyLoss],
) -> None:
    """A ratio of 20 moves a rare token by 0.19, which is within 0.2; its weight is 3 at most."""
    old, new = torch.tensor([0.01, 0.3, 0.3, 0.6, 0.6]), torch.tensor([0.2, 0.6, 0.6, 0.3, 0.3])
    advantages, log_probs = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0]), new.log().requires_grad_()
    losses, figures = of_tokens(make_loss("dppo_tv"), log_probs, old.log(), advantages)
    losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-3.0, 0.0, 2.0, -0.5, 0.0])
    assert figures["clipped"].tolist() == [False, True, False, False, True]
    assert figures["clipped_lower"].tolist() == [True] + [False] * 4


def test_dro_holds_a_token_without_advantage_near_what_it_was(
    make_loss: Callable[..., PolicyLoss],
) -> None:
    log_probs = torch.tensor([-1.0, -2.0]).requires_grad_()
    loss = make_loss("dro")
    losses, _ = of_tokens(loss, log_probs, torch.tensor([-3.0, -1.0]), torch.tensor([1.0, 0.0]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([1.0 + 0.15 * 4.0, 0.15])
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.0 + 0.3 * 2.0, -0.3])
    assert not loss.needs_advantage


def test_gspo_clips_by_the_geometric_mean_of_the_sequence(
    make_loss: Callable[..., PolicyLoss],
) -> None:
    """Ratios of 4 and 1/4 have the mean 1: nothing is clipped, and each token's own gradient
    is that of the whole sequence's weight."""
    log_probs = torch.tensor([4.0, 0.25, 1.6, 1.6]).log().requires_grad_()
    advantages = torch.ones(4)
    loss = make_loss("gspo")
    losses, figures = called(loss, log_probs, torch.zeros(4), advantages, [2, 2])
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.0, -1.0, -1.28, -1.28])
    assert figures["clipped"].tolist() == [False, False, True, True]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0])


def test_an_extreme_ratio_stays_finite(make_loss: Callable[..., PolicyLoss]) -> None:
    losses, _ = of_tokens(make_loss(), torch.zeros(1), torch.tensor([-1e4]), torch.ones(1))
    assert losses.tolist() == pytest.approx([-1.28])


def test_a_function_of_the_user_that_raises_late_is_named_with_its_line(
    make_loss: Callable[..., PolicyLoss], tmp_path: Path
) -> None:
    path = tmp_path / "my.py"
    path.write_text(
        "def late(batch):\n"
        "    if batch.log_probs[0] > 0.5:\n"
        "        raise RuntimeError('no more')\n"
        "    return -batch.advantages * batch.log_probs\n"
    )
    loss = make_loss(f"{path}:late")
    assert of_tokens(loss, torch.zeros(2), torch.zeros(2), torch.ones(2))[0].tolist() == [0, 0]
    with pytest.raises(ConfigError, match=r"my.py raised RuntimeError: no more \(my.py:3"):
        of_tokens(loss, torch.ones(2), torch.zeros(2), torch.ones(2))
