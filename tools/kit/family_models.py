"""Tiny random models, one of each family that the trainer supports, as directories.

Writes  a model directory: weights, config.json, and the tokenizer of the quickstart

Sizes suit vLLM's CPU kernels. Norms and biases are random too, so that a tensor that is swapped,
scaled or left out changes the log-probs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TOKENIZER = Path(__file__).parents[2] / "configs" / "models" / "spell-0.6m"
VOCAB = 264  #: more than the ids of the tokenizer
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 256,
    "eos_token_id": 257,
    "bos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
VISION = {"hidden_size": 32, "intermediate_size": 32}
TIED = {"tie_word_embeddings": True}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": TEXT | TIED,
    "qwen3": TEXT,
    "llama": TEXT | {"rope_parameters": LLAMA3_ROPE},
    "mistral": TEXT | {"sliding_window": None},
    "olmo3": TEXT | WINDOWS,
    "smollm3": TEXT | TIED | {"no_rope_layers": [1, 0]},
    "phi3": TEXT,
    "gemma3": {
        "text_config": TEXT | TIED | WINDOWS,
        "vision_config": VISION | {"num_hidden_layers": 1, "num_attention_heads": 1},
    },
    "gemma4": {
        "text_config": TEXT
        | TIED
        | WINDOWS
        | PER_LAYER
        | {"final_logit_softcapping": 30.0, "global_head_dim": 32},
        "vision_config": VISION | {"num_hidden_layers": 1, "num_attention_heads": 1},
    },
    "gpt_oss": TEXT | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": TEXT | EXPERTS | {"num_experts": 4},
    "glm4_moe_lite": TEXT
    | EXPERTS
    | LATENT
    | {"n_routed_experts": 4, "first_k_dense_replace": 1, "v_head_dim": 32, "head_dim": 16},
    "qwen3_5": {
        "text_config": TEXT | DELTA,
        "vision_config": VISION | {"depth": 1, "num_heads": 1, "out_hidden_size": 64},
    },
}


def write_family_model(kind: str, directory: Path, seed: int = 0) -> Path:
    """Write the tiny model of a family into the directory, and return it."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **FAMILIES[kind])
    auto: Any = AutoModelForImageTextToText if "vision_config" in FAMILIES[kind] else None
    model = (auto or AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    for file in [*TOKENIZER.glob("tokenizer*"), *TOKENIZER.glob("chat_template*")]:
        shutil.copy(file, directory)
    return directory
