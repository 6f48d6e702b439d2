"""Tiny models, configs and batches shared by the tests of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from laminar.config import Config, resolve_config
from laminar.storage.rules import TokenSpan
from laminar.training.model.policy import LoadedPolicy
from laminar.training.steps import TrainSample
from tools.kit.rank_group import RankGroup

VOCAB = 48


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., Qwen2ForCausalLM]:
    def build(seed: int = 0, *, tied: bool = True, **fields: Any) -> Qwen2ForCausalLM:
        torch.manual_seed(seed)
        config = Qwen2Config(
            **{
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "initializer_range": 0.15,
                "tie_word_embeddings": tied,
                **fields,
            }
        )
        return Qwen2ForCausalLM(config).float().eval()

    return build


@pytest.fixture
def make_policy(make_model: Callable[..., Qwen2ForCausalLM]) -> Callable[..., LoadedPolicy]:
    def build(seed: int = 0, *, limit: int = VOCAB, **fields: Any) -> LoadedPolicy:
        return LoadedPolicy(make_model(seed, **fields), limit)

    return build


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """Config from dotted keys; learning rate 0, no decay and no clipping unless given."""

    def build(flat: dict[str, Any] | None = None) -> Config:
        return resolve_config(
            {
                "model.name": "unused",
                "data.dataset": "unused",
                "data.max_response_length": 20,
                "optim.lr": 0.0,
                "optim.weight_decay": 0.0,
                "optim.clip_grad": 0.0,
                "algorithm.rollout_correction.mismatch_limit": 1e9,
            }
            | (flat or {})
        )

    return build


@pytest.fixture
def make_samples() -> Callable[..., list[TrainSample]]:
    """Random samples: groups x siblings of mixed lengths, temperatures and behaviour.

    Each has one span: of the source that is given, or of one of two replicas and two versions. With
    `turns` every second of more than two tokens has three, and reads something before each.
    """

    def build(
        groups: int = 3,
        siblings: int = 4,
        seed: int = 0,
        source: tuple[str, int, int] | None = None,
        turns: bool = False,
        **fields: Any,
    ) -> list[Any]:
        rng = np.random.default_rng(seed)
        found = []
        for g in range(groups):
            prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).astype(np.int32)
            for k in range(siblings):
                length = int(rng.integers(1, 15))
                values = {
                    "sample_id": f"0.{g}.{k}",
                    "group_id": f"0.{g}",
                    "prompt_ids": prompt,
                    "response_ids": rng.integers(0, VOCAB, length).astype(np.int32),
                    "logprobs": rng.normal(-4.0, 1.2, length).clip(max=0).astype(np.float32),
                    "reward": float(rng.random()),
                    "temperature": (0.7, 1.0, 1.3)[k % 3],
                    "truncated": k == 1,
                }
                found_source = source or (f"rollout-{g % 2}", 3 + k % 2, 3 + k % 2)
                values["spans"] = (TokenSpan(*found_source, length),)
                if turns and k % 2 and length > 2:
                    contexts = (rng.integers(0, VOCAB, n).astype(np.int32) for n in (3, 1))
                    values |= {"turns": (1, length - 2, 1), "contexts": tuple(contexts)}
                found.append(TrainSample(**(values | fields)))
        return found

    return build


@pytest.fixture
def model_directory(
    tmp_path: Path, make_model: Callable[..., Qwen2ForCausalLM]
) -> Callable[..., Path]:
    """A whole model on disk: weights, config, tokenizer, chat template, generation config."""

    def write(**fields: Any) -> Path:
        directory = tmp_path / "model"
        make_model(1, **fields).save_pretrained(directory)
        vocab = {chr(97 + i): i for i in range(26)} | {"<pad>": 26, "<eos>": 27}
        tokenizer = Qwen2Tokenizer(
            vocab=vocab, merges=[], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>"
        )
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        tokenizer.save_pretrained(directory)
        # As published models have it: sampling defaults without do_sample, several end tokens.
        generation = {"eos_token_id": [27, 5], "temperature": 0.6, "top_p": 0.9}
        (directory / "generation_config.json").write_text(json.dumps(generation))
        return directory

    return write


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankGroup]:
    group = RankGroup()
    yield group
    group.close()
