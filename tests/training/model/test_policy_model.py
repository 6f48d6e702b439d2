"""Loading a policy: what it gives, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from laminar.config import ConfigError
from laminar.training.learner import Learner
from laminar.training.model.micro_batches import pad_token_rows
from laminar.training.model.policy import Compute, cast_linear, load_policy
from tools.kit.one_process import named_weights

Make = Callable[..., Any]
EMBEDDING = "model.embed_tokens.weight"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_checkpoint_of_any_type_becomes_float32(model_directory: Make) -> None:
    directory = model_directory()
    rewrite(directory, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    policy = load_policy(str(directory), "cpu", tokenizer_size=28)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.vocab_limit == 28
    assert not policy.model.training


def test_the_logits_bound_the_vocabulary_of_a_larger_tokenizer(model_directory: Make) -> None:
    assert load_policy(str(model_directory()), "cpu", tokenizer_size=999).vocab_limit == 48


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.*cannot be loaded"):
        load_policy(str(tmp_path / "absent"), "cpu", tokenizer_size=28)


def test_a_missing_tensor_is_refused(model_directory: Make) -> None:
    directory = model_directory()
    rewrite(directory, lambda t: t.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks tensors.*layers\.1\.mlp\.up_proj"):
        load_policy(str(directory), "cpu", tokenizer_size=28)


def test_an_unexpected_tensor_is_refused(model_directory: Make) -> None:
    directory = model_directory()
    name = "model.layers.0.self_attn.q_norm.weight"
    rewrite(directory, lambda t: t.update({name: torch.ones(8)}))
    with pytest.raises(ConfigError, match=r"does not use.*q_norm"):
        load_policy(str(directory), "cpu", tokenizer_size=28)


def test_a_tensor_of_another_shape_is_refused(model_directory: Make) -> None:
    directory = model_directory()
    rewrite(directory, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(
        ConfigError, match=r"cannot be loaded: .*shape|cannot be loaded: .*mismatch"
    ):
        load_policy(str(directory), "cpu", tokenizer_size=28)


def test_pickled_weights_are_refused(model_directory: Make) -> None:
    directory = model_directory()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_policy(str(directory), "cpu", tokenizer_size=28)


@pytest.mark.parametrize("head", [True, False])
def test_a_tied_tensor_may_be_stored_under_either_name(head: bool, model_directory: Make) -> None:
    directory = model_directory(tied=True)
    if head:
        rewrite(directory, lambda t: t.update({"lm_head.weight": t.pop(EMBEDDING)}))
    names = dict(named_weights(load_policy(str(directory), "cpu", tokenizer_size=28).model))
    assert EMBEDDING in names and "lm_head.weight" not in names


def test_dropout_of_the_config_never_acts(
    model_directory: Make, make_config: Make, make_samples: Make
) -> None:
    directory = model_directory(attention_dropout=0.5)
    policy = load_policy(str(directory), "cpu", tokenizer_size=48)
    learner = Learner(make_config(), policy)
    assert policy.model.config.attention_dropout == 0.5
    losses = [learner.train_step(make_samples(), s).metrics["actor/pg_loss"] for s in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_carry_their_hugging_face_names_and_tied_ones_come_once(
    tied: bool, make_model: Make
) -> None:
    model = make_model(tied=tied)
    found = list(named_weights(model))
    names = [name for name, _ in found]
    assert ("lm_head.weight" in names) == (not tied)
    assert "model.embed_tokens.weight" in names and len(set(names)) == len(names)
    assert sum(t.numel() for _, t in found) == model.num_parameters()
    assert dict(found)["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
    assert not any(t.requires_grad for _, t in found)


@pytest.mark.parametrize("tied", [True, False])
def test_linear_layers_in_the_compute_type_give_the_same_scores(
    tied: bool, make_policy: Make
) -> None:
    policy = make_policy(tied=tied)
    rows = pad_token_rows([np.arange(40, dtype=np.int32)], [1], policy.device)
    compute = Compute(torch.bfloat16, 16)
    temperature = torch.full((39,), 0.7)
    with torch.no_grad():
        before = policy.log_probs(rows, temperature, compute, "value")
        cast_linear(policy.model, torch.bfloat16)
        after = policy.log_probs(rows, temperature, compute, "value")
    assert torch.equal(before.log_probs, after.log_probs)
    assert torch.equal(before.entropy, after.entropy)
    head, embedding = policy.model.lm_head.weight, policy.model.model.embed_tokens.weight
    assert policy.model.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16
    assert embedding.dtype == policy.model.model.norm.weight.dtype == torch.float32
    assert head.dtype == (torch.float32 if tied else torch.bfloat16)


def test_the_reference_is_held_in_the_compute_type_and_what_is_trained_is_not(
    make_policy: Make, make_config: Make
) -> None:
    """Its digest, which a checkpoint has, does not depend on that type."""
    settings = {"algorithm.use_kl_loss": True}
    found = {}
    for dtype in ("float32", "bfloat16"):
        config = make_config(settings | {"trainer.dtype": dtype})
        learner = Learner(config, make_policy(0), reference=make_policy(1))
        found[dtype] = learner.reference_digest
        assert learner.reference is not None
        layer = learner.reference.model.model.layers[0]
        assert layer.mlp.up_proj.weight.dtype == getattr(torch, dtype)
        assert {p.dtype for p in learner.policy.model.parameters()} == {torch.float32}
    assert found["float32"] == found["bfloat16"] != ""
