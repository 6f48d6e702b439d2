"""Every config field is implemented, harmless, off, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laminar.engines.hf_config import Llama3Rope, get_positions, parse_hf_config, read_hf_config
from laminar.engines.protocol import EngineError

QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA31: dict[str, Any] = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = QWEN25 | {"model_type": "qwen3", "head_dim": 128, "attention_bias": False}


def test_published_configs_are_read() -> None:
    qwen = parse_hf_config(QWEN25)
    assert (qwen.head_dim, qwen.num_kv_heads, qwen.tied, qwen.rope_theta) == (64, 2, True, 1e6)
    assert (qwen.qkv_bias, qwen.qk_norm, qwen.rope_scaling) == (True, False, None)
    llama = parse_hf_config(LLAMA31)
    assert (llama.head_dim, llama.qkv_bias, llama.rope_theta) == (64, False, 5e5)
    assert llama.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    qwen3 = parse_hf_config(QWEN3)
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)


def test_new_and_old_rope_fields_mean_the_same() -> None:
    new = {k: v for k, v in LLAMA31.items() if not k.startswith("rope_")}
    new["rope_parameters"] = LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}
    assert parse_hf_config(new) == parse_hf_config(LLAMA31)
    older = LLAMA31["rope_scaling"] | {"type": "llama3"}
    assert parse_hf_config(LLAMA31 | {"rope_scaling": older}) == parse_hf_config(LLAMA31)


def test_old_llama_configs_get_the_documented_defaults() -> None:
    config = {
        k: v for k, v in LLAMA31.items() if k not in ("rope_scaling", "rope_theta", "head_dim")
    }
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    spec = parse_hf_config(config)
    assert (spec.num_kv_heads, spec.rope_theta, spec.tied) == (32, 10_000.0, False)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN25, {"model_type": "mixtral"}, "'mixtral' is not supported.*llama, qwen2, qwen3"),
        (QWEN25, {"model_type": None}, "None is not supported"),
        (QWEN25, {"num_experts": 8}, "num_experts = 8"),
        (QWEN25, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (QWEN25, {"use_sliding_window": True}, "sliding windows"),
        (QWEN25, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (QWEN25, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (QWEN25, {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        (QWEN25, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (QWEN25, {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        (QWEN25, {"vocab_size": "many"}, "vocab_size = 'many'"),
        (QWEN25, {"hidden_size": 900}, "hidden_size = 900"),
        (QWEN25, {"head_dim": 63}, "head_dim = 63 is odd"),
        (QWEN25, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        (QWEN25, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic'"),
        (QWEN25, {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor"),
        (QWEN25, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (QWEN3, {"attention_bias": True}, "attention_bias = True"),
        (QWEN3, {"head_dim": None}, "head_dim is missing"),
        (LLAMA31, {"mlp_bias": True}, "mlp_bias = True"),
        (LLAMA31, {"pretraining_tp": 2}, "pretraining_tp = 2"),
        (LLAMA31, {"sliding_window": 4096}, "sliding_window = 4096"),
        (LLAMA31, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs exactly"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        parse_hf_config(base | change)


FINE_TUNED: dict[str, Any] = {
    "_attn_implementation": "sdpa",
    "_attn_implementation_autoset": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"},
    "max_length": 20,
    "problem_type": "single_label_classification",
    "repetition_penalty": 1.1,
    "suppress_tokens": [5],
    "temperature": 0.6,
    "tokenizer_class": "Qwen2Tokenizer",
    "unsloth_fixed": True,
    "unsloth_version": "2026.11.1",
}


def test_fields_that_programs_leave_in_fine_tunes_have_no_effect() -> None:
    assert parse_hf_config(QWEN25 | FINE_TUNED) == parse_hf_config(QWEN25)
    for field in FINE_TUNED:  # by name: one that only resembles it stays refused
        with pytest.raises(EngineError, match=f"config field {field}_scale = 2 is not implemented"):
            parse_hf_config(QWEN25 | {f"{field}_scale": 2})


def test_config_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        read_hf_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        read_hf_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(EngineError, match="holds a JSON list"):
        read_hf_config(tmp_path)
    path.unlink()
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(EngineError, match=r"an adapter of 'org/base', not a model.*lora\.rank"):
        read_hf_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(EngineError, match="an adapter of another model"):
        read_hf_config(tmp_path)
    path.write_text(json.dumps(QWEN25))
    assert parse_hf_config(read_hf_config(tmp_path)) == parse_hf_config(QWEN25)


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_longrope_is_used_up_to_its_original_length(where: str) -> None:
    """Above it transformers and vLLM choose other factors."""
    phi = {"model_type": "phi3", "max_position_embeddings": 131_072}
    assert get_positions(phi) == 131_072
    longer = phi | {"original_max_position_embeddings": 4_096}
    assert get_positions(longer | {where: {"rope_type": "longrope"}}) == 4_096
    assert get_positions(longer | {where: {"rope_type": "default"}}) == 131_072
    inside = {"type": "longrope", "original_max_position_embeddings": 2_048}
    assert get_positions(phi | {where: inside}) == 2_048


def test_a_multimodal_config_gives_the_fields_of_its_language_model(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "tie_word_embeddings": False}
    whole = {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = read_hf_config(tmp_path)
    assert found["hidden_size"] == 64
    assert (found["model_type"], found["tie_word_embeddings"]) == ("gemma3", True)
