"""Tiny random models of every supported family, and helpers to run the torch engine on them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from laminar.engines.protocol import GenerateRequest
from laminar.engines.torch.engine import TorchEngine

torch.set_num_threads(1)

VOCAB = 97
MAX_LEN = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = ("qwen2", "qwen3", "llama")


def build(family: str, seed: int = 0) -> Any:
    """A float32 model whose biases and norms are random too, so that none can be left out."""
    torch.manual_seed(seed)
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def engine_of(model: Any, slots: int = 8, **kwargs: Any) -> TorchEngine:
    settings: dict[str, Any] = {
        "max_num_seqs": slots,
        "max_model_len": MAX_LEN,
        "dtype": torch.float32,
        "device": "cpu",
    }
    engine = TorchEngine(model.config.to_dict(), **(settings | kwargs))
    engine.load_weights(model.named_parameters())
    return engine


def request(
    name: str,
    prompt: tuple[int, ...],
    *,
    done: tuple[int, ...] = (),
    limit: int = 20,
    temperature: float = 1.0,
    seed: int = 1,
    stop: frozenset[int] = frozenset(),
) -> GenerateRequest:
    return GenerateRequest(name, prompt, done, limit, temperature, seed, stop)


class Output:
    """What an engine produced for one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: str | None = None


def collect(outputs: dict[str, Output], deltas: list[Any]) -> None:
    for delta in deltas:
        output = outputs.setdefault(delta.request_id, Output())
        if output.reason is not None:
            raise ValueError(f"delta after the end of {delta.request_id}")
        output.tokens += delta.token_ids
        output.logprobs += delta.logprobs
        output.reason = delta.finish_reason


def run_all(engine: TorchEngine, *requests: GenerateRequest) -> dict[str, Output]:
    """Add, step until nothing is left, collect."""
    for item in requests:
        engine.add(item)
    outputs: dict[str, Output] = {}
    while deltas := engine.step():
        collect(outputs, deltas)
    return outputs


def run_one(engine: TorchEngine, item: GenerateRequest) -> Output:
    return run_all(engine, item)[item.request_id]


@torch.no_grad()
def hf_logprobs(model: Any, ids: list[int], temperature: float, limit: int = VOCAB) -> torch.Tensor:
    """log softmax(logits / T) [len(ids), limit] of a plain full forward pass."""
    logits = model(torch.tensor([ids])).logits[0, :, :limit].float()
    return torch.log_softmax(logits / temperature, -1)
