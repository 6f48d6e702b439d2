"""Layers that compute their activations again: the same training, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from laminar.config import ConfigError
from laminar.training.checkpoints.checkpoint import iter_moments
from laminar.training.learner import Learner
from laminar.training.model.policy import recompute_layers
from tools.kit import live_bytes as saved

Make = Callable[..., Any]


def saved_bytes(model: Any, tokens: int) -> int:
    """Bytes that a forward pass keeps for its backward pass, without parameters."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return saved.saved_bytes(
        model.parameters(), lambda: model.base_model(input_ids=ids, use_cache=False)
    )


def per_token_and_layer(make_model: Make, change: Callable[[Any], None]) -> float:
    found = {}
    for layers in (1, 2):
        model = make_model(num_hidden_layers=layers)
        change(model)
        found[layers] = saved_bytes(model, 100) - saved_bytes(model, 20)
    return (found[2] - found[1]) / 80


def test_a_layer_keeps_its_input_only(make_model: Make) -> None:
    off = per_token_and_layer(make_model, lambda model: None)
    on = per_token_and_layer(make_model, recompute_layers)
    assert on == 4 * 32  # float32, of the hidden size
    assert on <= 0.1 * off


def trained(learner: Learner, make_samples: Make) -> dict[str, bytes]:
    """Names and bytes of gradients, weights and moments."""
    for step in range(2):
        learner.train_step(make_samples(seed=step), step)
    model = learner.policy.model
    found = dict(model.state_dict()) | dict(iter_moments(model, learner.optimizer))
    found |= {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_moments_and_names_are_the_same(
    dtype: str, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    found = {}
    for setting in ("auto", "off", "on"):
        config = make_config(
            {
                "trainer.activation_checkpointing": setting,
                "trainer.dtype": dtype,
                "optim.lr": 0.01,
                "algorithm.entropy_coeff": 0.01,
                "trainer.logit_chunk_tokens": 16,
            }
        )
        found[setting] = trained(Learner(config, make_policy()), make_samples)
    assert found["on"] == found["off"] == found["auto"]


def test_auto_is_off_on_a_cpu(make_policy: Make, make_config: Make) -> None:
    kept = {}
    for setting in ("auto", "off", "on"):
        config = make_config({"trainer.activation_checkpointing": setting})
        kept[setting] = saved_bytes(Learner(config, make_policy()).policy.model, 20)
    assert kept["on"] < kept["off"] == kept["auto"]


def test_a_model_whose_layers_are_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing: a Linear .*set it to off"):
        recompute_layers(torch.nn.Linear(2, 2))
