"""What training takes, from shapes alone, against what real layers of real width take.

Each model has two layers of the width of a published one (Qwen2-0.5B, Qwen3-0.6B, Llama-3.2-1B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from laminar.config import Config
from laminar.storage.rules import TokenSpan
from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.learner import Learner, run_measured_step
from laminar.training.metrics import memory_metrics
from laminar.training.model import lora
from laminar.training.model.footprint import (
    TrainingPlan,
    _adapter_activations,
    activation_bytes,
    estimate_footprint,
    pass_tokens,
    sizes_of,
    sum_bytes,
    way_of,
)
from laminar.training.model.micro_batches import collate_samples
from laminar.training.model.policy import (
    Compute,
    LoadedPolicy,
    _make_autocast,
    cast_linear,
    get_base_weights,
    recompute_layers,
)
from laminar.training.objective import ObjectiveConfig, compute_objective
from laminar.training.steps import TrainSample
from tools.kit.extras import needs_peft
from tools.kit.live_bytes import LiveBytes, saved_bytes
from tools.kit.one_process import named_weights

Make = Callable[..., Any]
ROWS, PROMPT, RESPONSE = 4, 16, 112
TOKENS = ROWS * (PROMPT + RESPONSE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOTH = [pytest.param("float32", marks=pytest.mark.long), "bfloat16"]
"""Of a pass: a bfloat16 one has the float32 masters in it, too."""
WIDTHS: dict[str, Any] = {
    "qwen2": lambda **more: Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
        **more,
    ),
    "qwen3": lambda **more: Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, **more,
    ),
    "llama": lambda **more: LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        **more,
    ),
}  # fmt: skip
FAMILIES = ["qwen2", "qwen3", pytest.param("llama", marks=pytest.mark.long)]
"""Llama is the widest, and has nothing that Qwen2 has not."""


def made(family: str, vocabulary: int = 64, *, tied: bool = True, layers: int = 2) -> Any:
    """Weights are ones: what they are changes no size, and random ones of this width take long."""
    fields = {"vocab_size": vocabulary, "tie_word_embeddings": tied, "num_hidden_layers": layers}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(WIDTHS[family](**fields))
    model.to_empty(device="cpu")
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, 0.01)
    return model.float().eval()


def sizes(model: Any) -> Any:
    shapes = {name: tuple(tensor.shape) for name, tensor in get_base_weights(model).items()}
    return sizes_of(model.config.to_dict(), shapes)


def way(dtype: str, **more: Any) -> TrainingPlan:
    fields = {
        "tokens": TOKENS, "chunk_tokens": 128, "compute": DTYPES[dtype].itemsize,
        "recomputes": False, "entropy_bonus": False, "reference": False, "copies": False,
        "published": 4,
    }  # fmt: skip
    return TrainingPlan(**(fields | more))


def samples(vocabulary: int) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    return [
        TrainSample(
            sample_id=str(row),
            group_id="g",
            prompt_ids=rng.integers(0, vocabulary, PROMPT).astype(np.int32),
            response_ids=rng.integers(0, vocabulary, RESPONSE).astype(np.int32),
            logprobs=np.full(RESPONSE, -4.0, dtype=np.float32),
            reward=0.0,
            temperature=0.7,
            truncated=False,
            spans=(TokenSpan("rollout-0", 0, 0, RESPONSE),),
            advantage=1.0,
        )
        for row in range(ROWS)
    ]


def peak_of_a_pass(model: Any, way: TrainingPlan, config: Config) -> int:
    """Bytes beside parameters and gradients, at the most, in one forward and backward pass."""
    if way.recomputes:
        recompute_layers(model)
    vocabulary = model.config.vocab_size
    micro = collate_samples(samples(vocabulary), torch.device("cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in trained]
    dtype = next(t for t in DTYPES.values() if t.itemsize == way.compute)
    chunks = Compute(dtype, way.chunk_tokens)
    how = ObjectiveConfig(config.algorithm, PolicyLoss(config.algorithm), RESPONSE, chunks)
    counts = BatchCounts(ROWS * RESPONSE, ROWS)
    with LiveBytes([*model.parameters(), *model.buffers(), *gradients]) as live:
        part = compute_objective(LoadedPolicy(model, vocabulary), None, micro, None, counts, how)
        torch.autograd.backward(part.loss)
    return live.peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_keeps_of_a_token(family: str, dtype: str) -> None:
    assert kept_of_a_token(dtype, lambda layers: made(family, layers=layers)) == activation_bytes(
        sizes(made(family)), DTYPES[dtype].itemsize
    )


def kept_of_a_token(dtype: str, make: Callable[[int], Any]) -> float:
    """To the byte: counted are two lengths and two depths, the rest of the model falls out."""
    kept = {}
    for layers in (2, 3):  # nothing before the first adapter has a gradient
        model = make(layers)
        for tokens in (20, 100):
            ids = torch.zeros(1, tokens, dtype=torch.int64)

            def forward(model: Any = model, ids: torch.Tensor = ids) -> None:
                with _make_autocast(torch.device("cpu"), DTYPES[dtype]):
                    model.base_model(input_ids=ids, use_cache=False)

            kept[layers, tokens] = saved_bytes(model.parameters(), forward)
    return (kept[3, 100] - kept[3, 20] - (kept[2, 100] - kept[2, 20])) / 80


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("family", "vocabulary"),
    [
        ("qwen2", 64),
        ("qwen3", 64),
        pytest.param("llama", 64, marks=pytest.mark.long),
        ("qwen3", 16_384),
    ],
)
def test_a_pass_takes_what_is_said_within_a_fifth(
    family: str, dtype: str, recomputes: bool, vocabulary: int, make_config: Make
) -> None:
    """With a small vocabulary a layer takes the most, with a large one the head."""
    model = made(family, vocabulary)
    asked = way(dtype, recomputes=recomputes)
    said = sum_bytes(estimate_footprint(sizes(model), asked).device) - 16 * sizes(model).parameters
    assert said == pytest.approx(peak_of_a_pass(model, asked, make_config()), rel=0.2)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bonus", [pytest.param(0.0, marks=pytest.mark.long), 0.01])
@pytest.mark.parametrize("chunk", [pytest.param(32, marks=pytest.mark.long), 10_000])
def test_the_head_takes_what_is_said_within_a_fifth(
    chunk: int, bonus: float, tied: bool, make_config: Make
) -> None:
    """In one chunk logits are the most; in small ones the gradients of the head that are added."""
    model = made("qwen2", 30_000, tied=tied, layers=1)
    asked = way("float32", recomputes=True, chunk_tokens=chunk, entropy_bonus=bool(bonus))
    said = sum_bytes(estimate_footprint(sizes(model), asked).device) - 16 * sizes(model).parameters
    found = peak_of_a_pass(model, asked, make_config({"algorithm.entropy_coeff": bonus}))
    assert said == pytest.approx(found, rel=0.2)


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step_without_gradient(learner: Learner, parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Make a step of the optimizer; return its moments."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    states = learner.optimizer.state.values()
    return [state[kind] for state in states for kind in state if kind != "step"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_is_exact(family: str, tied: bool, make_config: Make) -> None:
    model = made(family, 300, tied=tied, layers=1)
    learner = Learner(make_config({"trainer.device": "cpu"}), LoadedPolicy(model, 300))
    moments = step_without_gradient(learner, model.parameters())
    found = estimate_footprint(sizes(model), way("float32", copies=True))
    assert found.device["parameters"] == bytes_of(model.parameters())
    assert found.device["gradients"] == bytes_of(p.grad for p in model.parameters())
    assert found.device["Adam's moments"] == bytes_of(moments)
    assert found.host["checkpoint copies"] == bytes_of([*model.parameters(), *moments])
    cast_linear(model, torch.bfloat16)
    asked = estimate_footprint(sizes(model), way("bfloat16", reference=True))
    assert asked.device["reference model"] == bytes_of(model.parameters())


RANK = 8


def adapted(config: Config, dtype: str, family: str, vocabulary: int = 64, **more: Any) -> Any:
    """As a run has it: the base of the compute type, adapters float32."""
    model = made(family, vocabulary, **more)
    if dtype == "bfloat16":
        cast_linear(model, torch.bfloat16)
    lora.inject_adapters(model, config.lora)
    return model


def adapting(dtype: str, **more: Any) -> TrainingPlan:
    published = DTYPES[dtype].itemsize
    return way(dtype, rank=RANK, modules=("all-linear",), **({"published": published} | more))


@needs_peft
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_of_adapters_is_exact(dtype: str, tied: bool, make_config: Make) -> None:
    config = make_config({"trainer.device": "cpu", "lora.rank": RANK})
    model = adapted(config, dtype, "qwen3", 300, tied=tied)
    learner = Learner(config, LoadedPolicy(model, 300, base="of a test"))
    adapters = [parameter for _, parameter in lora.list_adapter_parameters(model)]
    moments = step_without_gradient(learner, adapters)
    found = estimate_footprint(sizes(model), adapting(dtype, copies=True, reference=True))
    assert found.device["base"] == bytes_of(get_base_weights(model).values())
    assert found.device["adapters"] == found.device["gradients"] == bytes_of(adapters)
    assert found.device["Adam's moments"] == bytes_of(moments)
    assert not {"parameters", "reference model"} & found.device.keys()
    copied = [tensor for _, tensor in named_weights(model)]
    assert found.host["checkpoint copies"] == bytes_of([*copied, *adapters, *moments])
    shared = estimate_footprint(sizes(model), adapting(dtype, ranks=2))
    assert 2 * shared.device["base"] == 4 * sizes(model).parameters


@needs_peft
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_with_adapters_keeps_of_a_token(
    family: str, dtype: str, make_config: Make
) -> None:
    config = make_config({"lora.rank": RANK})
    found = kept_of_a_token(dtype, lambda layers: adapted(config, dtype, family, layers=layers))
    model, asked = sizes(made(family)), adapting(dtype)
    assert found == activation_bytes(model, asked.compute) + _adapter_activations(model, asked)


@needs_peft
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "vocabulary"), [("qwen2", 64), pytest.param("qwen3", 16_384, marks=pytest.mark.long)]
)
def test_a_pass_with_adapters_takes_what_is_said_within_a_fifth(
    family: str, dtype: str, recomputes: bool, vocabulary: int, make_config: Make
) -> None:
    config = make_config({"lora.rank": RANK})
    model = adapted(config, dtype, family, vocabulary)
    asked = adapting(dtype, recomputes=recomputes)
    parts = estimate_footprint(sizes(model), asked).device
    said = sum(parts.get(n, 0) for n in ("activations", "casts of the weights", "head and logits"))
    assert said == pytest.approx(peak_of_a_pass(model, asked, config), rel=0.2)


def test_ranks_and_offload_move_the_state() -> None:
    model = sizes(made("llama", layers=2))
    alone, shared = (estimate_footprint(model, way("bfloat16", ranks=ranks)) for ranks in (1, 4))
    for name in ("parameters", "gradients", "Adam's moments"):
        assert 4 * shared.device[name] == alone.device[name]
    whole = shared.device["gathered layers"]
    assert whole >= 4 * model.largest_layer and "gathered layers" not in alone.device
    moved = estimate_footprint(model, way("bfloat16", offload="all", reference=True))
    assert sum_bytes(moved.host) == 20 * model.parameters
    assert "Adam's moments" not in moved.device
    assert moved.device["gathered layers"] == whole


def test_the_pass_is_of_the_budget_of_one_row_at_least_and_of_the_batch_at_most(
    make_config: Make,
) -> None:
    lengths = {"data.max_prompt_length": 100, "data.max_response_length": 400}
    batch = {"data.train_batch_size": 4, "rollout.group_size": 2}
    for budget, tokens in ((100, 500), (1_000, 1_000), (10_000, 4_000)):
        config = make_config(lengths | batch | {"trainer.micro_batch_tokens": budget})
        assert pass_tokens(config) == tokens


def test_the_way_is_that_of_the_settings(make_config: Make) -> None:
    gpu, cpu = (way_of(make_config(), gpu=gpu) for gpu in (True, False))
    assert (gpu.compute, gpu.published, gpu.recomputes) == (2, 2, True)
    assert (cpu.compute, cpu.published, cpu.recomputes) == (4, 4, False)
    settings = {
        "trainer.dtype": "float32", "weights.dtype": "float32", "algorithm.use_kl_loss": True,
        "trainer.activation_checkpointing": "off", "trainer.save_freq": 0,
        "algorithm.entropy_coeff": 0.1, "trainer.logit_chunk_tokens": 7,
    }  # fmt: skip
    found = way_of(make_config(settings), gpu=True)
    assert found == replace(
        cpu, gpu=True, chunk_tokens=7, entropy_bonus=True, reference=True, copies=False
    )


def test_a_step_says_what_was_estimated_and_what_was_measured(
    make_policy: Make, make_config: Make, make_samples: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the measure is of the process; the step itself is a function of its samples."""
    policy = make_policy()
    learner = Learner(make_config(), policy)
    found = run_measured_step(learner, make_samples(), 0).metrics
    asked = estimate_footprint(sizes(policy.model), way_of(make_config(), gpu=False))
    assert found["perf/estimated_memory_gb"] == sum_bytes(asked.device) / 1e9
    resident = psutil.Process().memory_info().rss / 1e9
    assert 0.9 * resident <= found["perf/max_resident_gb"] <= 100 * resident
    assert not [name for name in learner.train_step(make_samples(), 1).metrics if "_gb" in name]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 10**9)
    assert memory_metrics(torch.device("cuda", 1), 5 * 10**9) == {
        "perf/max_memory_allocated_gb": 3.0, "perf/estimated_memory_gb": 5.0,
    }  # fmt: skip
