"""Memory of a pass: head and softmax in chunks beside all in one, and activation checkpointing.

Reads   nothing; models have random weights
Gives   a JSON line per objective (peak bytes, CPU seconds, loss and gradient in chunks, beside one
        chunk) and per family of models (bytes that a layer keeps of a token, with checkpointing and
        without); exit code 1 where a bar is missed

Peak is of what torch's operations make, beside parameters and their gradients; it is counted in a
pass of its own, and CPU seconds are the median of some passes that take turns.

    python tools/bench/pass_memory.py [NAME ...] [--tokens 1024] [--vocabulary 151936]
        [--chunk 128] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from laminar.config import Config, resolve
from laminar.storage.rules import Span
from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.model.micro_batches import MicroBatch, collate
from laminar.training.model.policy import Compute, LoadedPolicy, recompute_layers
from laminar.training.objective import ObjectiveConfig, objective
from laminar.training.steps import TrainSample
from tools.kit.live_bytes import LiveBytes, saved_bytes

ROWS, PROMPT = 4, 5
TEMPERATURE = 0.7
BARS = {"peak": 0.25, "cpu": 1.7, "loss": 1e-6, "gradient": 1e-6, "saved": 0.1}
"""`cpu`: the forward pass of a chunk is made twice; were it as long as the backward pass, that
alone would be 1.5."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "policy": {},
    "entropy bonus": {"algorithm.entropy_coeff": 0.01},
    "KL": {"algorithm.use_kl_loss": True},
}
WIDTHS: dict[str, tuple[Any, dict[str, int]]] = {
    "Qwen2, 0.5B": (Qwen2Config, {"hidden_size": 896, "intermediate_size": 4864,
                                  "num_attention_heads": 14, "num_key_value_heads": 2}),
    "Qwen3, 0.6B": (Qwen3Config, {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
                                  "num_attention_heads": 16, "num_key_value_heads": 8}),
    "Llama, 1B": (LlamaConfig, {"hidden_size": 2048, "intermediate_size": 8192,
                                "num_attention_heads": 32, "num_key_value_heads": 8}),
}  # fmt: skip
LENGTHS = (20, 100)


class Made(NamedTuple):
    """What one forward and backward pass gave."""

    loss: float
    gradient: Tensor
    cpu_s: float


def narrow(vocabulary: int, seed: int) -> LoadedPolicy:
    """A model that is nearly all head."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LoadedPolicy(AutoModelForCausalLM.from_config(config).float().eval(), vocabulary)


def micro_batch(tokens: int, vocabulary: int) -> MicroBatch:
    rng = np.random.default_rng(0)
    length = tokens // ROWS
    samples = [
        TrainSample(
            sample_id=str(row),
            group_id="g",
            prompt_ids=rng.integers(0, vocabulary, PROMPT).astype(np.int32),
            response_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            logprobs=np.full(length, -np.log(vocabulary), dtype=np.float32),
            reward=0.0,
            temperature=TEMPERATURE,
            truncated=False,
            spans=(Span("rollout-0", 0, 0, length),),
            advantage=float(rng.normal()),
        )
        for row in range(ROWS)
    ]
    return collate(samples, torch.device("cpu"))


class Objective:
    """One objective, of the same rows with the same weights each time."""

    def __init__(self, config: Config, tokens: int, vocabulary: int) -> None:
        self._config, self._tokens = config, tokens
        self._policy = narrow(vocabulary, 0)
        self._reference = narrow(vocabulary, 1) if config.algorithm.use_kl_loss else None
        self._rows = micro_batch(tokens, vocabulary)

    def made(self, chunk: int) -> Made:
        own = self._fresh()
        begun = time.process_time()
        loss = self._pass(chunk)
        cpu_s = time.process_time() - begun
        return Made(loss, torch.cat([p.grad.flatten() for p in own if p.grad is not None]), cpu_s)

    def peak(self, chunk: int) -> int:
        own = self._fresh()
        own += [p.grad for p in own if p.grad is not None]
        if self._reference is not None:
            own += list(self._reference.model.parameters())
        with LiveBytes(own) as live:
            self._pass(chunk)
        return live.peak

    def _fresh(self) -> list[Tensor]:
        """The parameters, with gradients that are there already, as after a first pass."""
        parameters = list(self._policy.model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return list(parameters)

    def _pass(self, chunk: int) -> float:
        algorithm, compute = self._config.algorithm, Compute(torch.float32, chunk)
        how = ObjectiveConfig(algorithm, PolicyLoss(algorithm), self._tokens, compute)
        counts = BatchCounts(self._tokens, ROWS)
        part = objective(self._policy, self._reference, self._rows, None, counts, how)
        torch.autograd.backward(part.loss)
        return float(part.loss.detach())


def of_objective(name: str, options: argparse.Namespace) -> dict[str, Any]:
    flat = {"model.name": "none", "data.dataset": "none", **OBJECTIVES[name]}
    one = Objective(resolve(flat), options.tokens, options.vocabulary)
    chunks = (options.tokens, options.chunk)
    rounds = [[one.made(chunk) for chunk in chunks] for _ in range(options.rounds)]
    whole, parts = rounds[-1]
    cpu_s = [statistics.median(made[i].cpu_s for made in rounds) for i in range(2)]
    peaks = [one.peak(chunk) for chunk in chunks]
    apart = (parts.gradient.double() - whole.gradient.double()).norm()
    return {
        "objective": name,
        "peak GB": [peak / 1e9 for peak in peaks],
        "CPU s": cpu_s,
        "peak": peaks[1] / peaks[0],
        "cpu": cpu_s[1] / cpu_s[0],
        "loss": abs(parts.loss - whole.loss) / abs(whole.loss),
        "gradient": float(apart / whole.gradient.double().norm()),
    }


def of_family(name: str) -> dict[str, Any]:
    """Two lengths and two depths, so that the rest of the model falls out."""
    per_token = {}
    for recomputes in (False, True):
        kept = [
            [saved(name, layers, tokens, recomputes) for tokens in LENGTHS] for layers in (1, 2)
        ]
        one, two = (longer - shorter for shorter, longer in kept)
        per_token[recomputes] = (two - one) / (LENGTHS[1] - LENGTHS[0])
    return {
        "layers": name,
        "bytes": per_token[False],
        "bytes with checkpointing": per_token[True],
        "saved": per_token[True] / per_token[False],
    }


def saved(name: str, layers: int, tokens: int, recomputes: bool) -> int:
    kind, sizes = WIDTHS[name]
    config = kind(vocab_size=64, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if recomputes:
        recompute_layers(model)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return saved_bytes(model.parameters(), lambda: model.base_model(input_ids=ids, use_cache=False))


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.names or [*OBJECTIVES, *WIDTHS]:
        yield of_objective(name, options) if name in OBJECTIVES else of_family(name)


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="lines; none: all")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*OBJECTIVES, *WIDTHS}:
        parser.error(f"no such line: {', '.join(unknown)}; there are {[*OBJECTIVES, *WIDTHS]}")
    torch.set_num_threads(1)
    missed = 0
    for line in lines(options):
        above = [key for key, bar in BARS.items() if key in line and not line[key] <= bar]
        print(json.dumps({k: rounded(v) for k, v in line.items()} | {"above": above}), flush=True)
        missed += len(above)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
