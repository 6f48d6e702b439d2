"""Head and softmax in chunks of tokens: the same numbers, in a part of the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from laminar.config import ConfigError
from laminar.training.learner import Learner
from laminar.training.model.micro_batches import TokenRows, pad_token_rows
from laminar.training.model.policy import Compute, Entropy, LoadedPolicy, load_policy

Make = Callable[..., Any]
TOKENS, VOCAB = 64, 4000


class Largest(TorchDispatchMode):
    """The most elements that a tensor had which an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def scored_rows(vocabulary: int) -> TokenRows:
    ids = np.random.default_rng(0).integers(0, vocabulary, (2, 1 + TOKENS // 2)).astype(np.int32)
    return pad_token_rows(list(ids), [1, 1], torch.device("cpu"))


def backward(
    policy: LoadedPolicy,
    rows: TokenRows,
    chunk: int,
    entropy: Entropy = "value",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The scores; gradients are of log-probs, and entropies, with weights that differ."""
    policy.model.zero_grad()
    temperature = torch.linspace(0.7, 1.3, len(rows.targets))
    found = policy.log_probs(rows, temperature, Compute(dtype, chunk), entropy)
    weights = torch.linspace(-1, 2, len(rows.targets))
    loss = (weights * found.log_probs).sum()
    if entropy == "gradient":
        loss = loss + (weights * found.entropy).sum()
    torch.autograd.backward(loss)
    return torch.stack([found.log_probs, found.entropy]).detach()


def gradient_of(policy: LoadedPolicy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("entropy", ["value", "gradient"])
@pytest.mark.parametrize("chunk", [1, 7, TOKENS // 2])
def test_chunks_change_neither_scores_nor_gradient(
    chunk: int, entropy: Entropy, tied: bool, make_policy: Make
) -> None:
    policy, rows = make_policy(limit=40, tied=tied), scored_rows(40)
    scores = backward(policy, rows, TOKENS, entropy)
    gradient = gradient_of(policy)
    torch.testing.assert_close(backward(policy, rows, chunk, entropy), scores, rtol=1e-6, atol=1e-6)
    assert float((gradient_of(policy) - gradient).norm() / gradient.norm()) <= 1e-6


def test_in_bfloat16_the_gradient_of_the_head_is_summed_over_chunks_in_float32(
    make_policy: Make,
) -> None:
    """512 terms summed in bfloat16 would be off by several hundredths."""
    policy = make_policy(tied=False)
    ids = [np.random.default_rng(i).integers(0, 48, 65).astype(np.int32) for i in range(8)]
    rows = pad_token_rows(ids, [1] * 8, torch.device("cpu"))
    head = policy.model.get_output_embeddings().weight
    found = {}
    for chunk in (10**6, 1):
        backward(policy, rows, chunk, dtype=torch.bfloat16)
        found[chunk] = head.grad.clone()
    apart = (found[1] - found[10**6]).norm() / found[10**6].norm()
    assert float(apart) <= 5e-3


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_no_tensor_has_the_logits_of_more_tokens_than_a_chunk(
    entropy: Entropy, make_policy: Make
) -> None:
    policy, rows = make_policy(limit=VOCAB, vocab_size=VOCAB), scored_rows(VOCAB)
    parameters = max(p.numel() for p in policy.model.parameters())
    assert parameters < TOKENS * VOCAB  # else nothing is seen
    found = {}
    for chunk in (TOKENS, TOKENS // 8):
        with Largest() as largest:
            backward(policy, rows, chunk, entropy)
        found[chunk] = largest.elements
    assert found[TOKENS] == TOKENS * VOCAB
    assert found[TOKENS // 8] == max(TOKENS // 8 * VOCAB, parameters)


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_what_waits_for_the_backward_pass_has_no_vocabulary(
    entropy: Entropy, make_policy: Make
) -> None:
    policy, rows = make_policy(limit=VOCAB, vocab_size=VOCAB), scored_rows(VOCAB)
    shapes = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    temperature = torch.ones(TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.log_probs(rows, temperature, Compute(torch.float32, TOKENS // 8), entropy)
    assert shapes
    assert not [shape for shape in shapes if VOCAB in shape[1:]]


def test_sequences_of_one_token_have_no_scores(make_policy: Make, make_config: Make) -> None:
    learner = Learner(make_config({"trainer.logit_chunk_tokens": 2}), make_policy())
    assert learner.compute_logprobs([[3]]) == [[]]
    assert [len(found) for found in learner.compute_logprobs([[3], [1, 2, 3, 4, 5]])] == [0, 4]


def save_model(directory: Path, config: PreTrainedConfig) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, GraniteConfig])
def test_a_model_whose_logits_are_its_heads_is_loaded(
    kind: type[PreTrainedConfig], tmp_path: Path
) -> None:
    name = save_model(tmp_path, kind(**SIZES))
    assert load_policy(name, "cpu", tokenizer_size=40).vocab_limit == 40


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma2Config(**SIZES, final_logit_softcapping=5.0), "Gemma2ForCausalLM"),
        (GraniteConfig(**SIZES, logits_scaling=8.0), "GraniteForCausalLM"),
    ],
)
def test_a_model_that_caps_or_scales_its_logits_is_refused(
    config: PreTrainedConfig, named: str, tmp_path: Path
) -> None:
    name = save_model(tmp_path, config)
    with pytest.raises(ConfigError, match=rf"{named}, which scales or caps the output.*Qwen3"):
        load_policy(name, "cpu", tokenizer_size=48)
