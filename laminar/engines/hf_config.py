"""The part of a Hugging Face config.json that decides a decoder's forward pass.

Reads   config.json (as a dict, or from a model directory)
Gives   ModelSpec; EngineError names the field and the value that the torch engine does not support

A field that is silently ignored gives a model that runs and computes something else. So every
field is either implemented, known to have no effect on inference, switched off, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.config.families import FAMILIES, merge_text_fields
from laminar.engines.protocol import EngineError

SUPPORTED_MODEL_TYPES = sorted(kind for f in FAMILIES if f.torch_engine for kind in f.types)
DEFAULT_ROPE_THETA = 10_000.0  #: default of transformers

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
_IMPLEMENTED = frozenset(_REQUIRED) | {
    "head_dim",
    "hidden_act",
    "layer_types",
    "model_type",
    "num_key_value_heads",
    "pretraining_tp",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
}
#: Fields without effect on the logits of one forward pass.
_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",  # code for programs that do not know the type; known types never load it
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_window_layers",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
#: Settings of `generate` that older programs saved here; sampling is set by rollout.* alone.
_GENERATION = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
#: Classes of transformers that unpack weights, by quant_method.
UNPACKS = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
_KNOWN = _IMPLEMENTED | _WITHOUT_EFFECT | _GENERATION
_LLAMA3_FIELDS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1: long wavelengths are stretched, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and switches of a Qwen2, Qwen3 or Llama decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tied: bool  #: whether the output head is the embedding

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Read config.json of a model directory, or of its language model; raises EngineError."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if adapter := _describe_adapter(Path(directory)):
            raise EngineError(adapter) from None
        raise EngineError(
            f"{path} cannot be read ({error.strerror}); give the directory of a model"
        ) from None
    except ValueError as error:
        raise EngineError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise EngineError(f"{path} holds a JSON {type(config).__name__}, not an object")
    return merge_text_fields(config)


def _describe_adapter(directory: Path) -> str:
    """Return the reason to refuse a directory that has only an adapter; else empty."""
    path = directory / "adapter_config.json"
    if not path.is_file():
        return ""
    try:
        base = repr(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, TypeError, KeyError):
        base = "another model"
    return (
        f"{directory} has an adapter of {base}, not a model; merge it into that model "
        "(merge_and_unload and save_pretrained of peft), or name that model and train another "
        "adapter (lora.rank)"
    )


def refuse_packed_weights(config: Mapping[str, Any]) -> None:
    """Raise EngineError for weight files of a type that is not trained, such as MXFP4 or FP8."""
    packed = config.get("quantization_config")
    if not packed:
        return
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    unpacks = UNPACKS.get(str(method), "its class for this method")
    raise EngineError(
        f"its weight files are packed (quantization_config in config.json, quant_method = "
        f"{method!r}), and training needs them in bfloat16 or float32; convert the model with "
        f"from_pretrained(..., quantization_config={unpacks}(dequantize=True)) and "
        "save_pretrained(...) of transformers, or name a bfloat16 copy of it"
    )


def refuse_remote_code(config: Mapping[str, Any]) -> None:
    """Raise EngineError for a model whose classes only its directory has: they are never run."""
    if not config.get("auto_map"):
        return
    from transformers import CONFIG_MAPPING, __version__  # seconds to import

    if (kind := config.get("model_type")) not in CONFIG_MAPPING:
        raise EngineError(
            f"its classes are in its directory (auto_map in config.json), whose code is never run, "
            f"and transformers {__version__} has none for model_type = {kind!r}; use a release of "
            "transformers that has them, or another model"
        )


def refuse_auxiliary_loss(config: Mapping[str, Any]) -> None:
    """Raise EngineError for a mixture of experts whose config asks for a loss over its routers."""
    if config.get("output_router_logits"):
        raise EngineError(
            "output_router_logits = true in config.json asks for an auxiliary loss over the "
            "routers, which would depend on how sequences are packed into passes; set it to "
            "false, and watch actor/router_load/dead"
        )


def get_positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that engine and trainer compute alike; None: unknown.

    With longrope both choose other factors above the original length: transformers by the longest
    sequence of a pass, vLLM by the longest that may come."""
    ropes = (config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    if any("longrope" in (rope.get("rope_type"), rope.get("type")) for rope in ropes):
        found = (each.get("original_max_position_embeddings") for each in (*ropes, config))
        return next((length for length in found if length), None)
    return config.get("max_position_embeddings")


def parse_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """Parse a config; raises EngineError for everything that is not implemented."""
    kind = config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise EngineError(
            f"model_type = {kind!r} is not supported; the torch engine runs "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    _refuse_unknown(config)
    _refuse_variants(config)
    heads = _parse_number(config, "num_attention_heads")
    hidden = _parse_number(config, "hidden_size")
    theta, scaling = _parse_rope(config)
    spec = ModelSpec(
        model_type=kind,
        vocab_size=_parse_number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_parse_number(config, "intermediate_size"),
        num_layers=_parse_number(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(config, kind, heads),
        head_dim=_head_dim(config, kind, hidden, heads),
        rms_norm_eps=_parse_number(config, "rms_norm_eps", float),
        max_positions=_parse_number(config, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if spec.num_heads % spec.num_kv_heads:
        raise EngineError(
            f"num_key_value_heads = {spec.num_kv_heads} does not divide "
            f"num_attention_heads = {spec.num_heads}"
        )
    if spec.head_dim % 2:
        raise EngineError(f"head_dim = {spec.head_dim} is odd; rotary embeddings need an even one")
    return spec


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse fields of unknown meaning, unless null or false, which switch them off."""
    for name, value in config.items():
        if name not in _KNOWN and value is not None and value is not False:
            raise EngineError(
                f"config field {name} = {value!r} is not implemented by the torch engine; "
                "use another model, or remove the field if it does not change the forward pass"
            )


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Refuse known fields with values that require another forward pass."""
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(f"hidden_act = {config['hidden_act']!r}: only 'silu' is implemented")
    if config.get("pretraining_tp") not in (None, 1):
        raise EngineError(f"pretraining_tp = {config['pretraining_tp']!r}: only 1 is implemented")
    if config.get("use_sliding_window"):
        raise EngineError("use_sliding_window = true: sliding windows are not implemented")
    # Qwen configs carry a window size that the switch above leaves unused; Llama has no switch.
    if config["model_type"] == "llama" and config.get("sliding_window") is not None:
        raise EngineError(
            f"sliding_window = {config['sliding_window']!r}: sliding windows are not implemented"
        )
    for layer_type in config.get("layer_types") or ():
        if layer_type != "full_attention":
            raise EngineError(
                f"layer_types has {layer_type!r}: only 'full_attention' is implemented"
            )


def _parse_number(config: Mapping[str, Any], name: str, kind: type = int) -> Any:
    value = config.get(name)
    if value is None:
        raise EngineError(f"config field {name} is missing; the torch engine needs it")
    wrong = isinstance(value, bool) or not isinstance(value, (int, kind))
    if wrong or value <= 0:
        raise EngineError(f"config field {name} = {value!r} is not a positive {kind.__name__}")
    return kind(value)


def _kv_heads(config: Mapping[str, Any], kind: str, heads: int) -> int:
    if kind == "llama" and config.get("num_key_value_heads") is None:
        return heads  # configs older than grouped attention omit it
    return int(_parse_number(config, "num_key_value_heads"))


def _head_dim(config: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    """Return the head size: set for Qwen3, else by default an even share of the hidden size."""
    if kind == "qwen3" or config.get("head_dim") is not None:
        return int(_parse_number(config, "head_dim"))
    if hidden % heads:
        raise EngineError(f"hidden_size = {hidden} is not a multiple of {heads} attention heads")
    return hidden // heads


def _parse_rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Parse base and scaling from `rope_parameters`, or from the older pair of fields."""
    fields = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    older_name = fields.pop("type", None)
    kind = fields.pop("rope_type", None) or older_name or "default"
    theta = fields.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError("partial_rotary_factor other than 1.0 is not implemented")
    if kind == "llama3":
        return float(theta), _parse_llama3_rope(fields)
    if kind != "default":
        raise EngineError(f"rope_type = {kind!r}: only 'default' and 'llama3' are implemented")
    if fields:
        raise EngineError(f"rope_type 'default' does not use {', '.join(sorted(fields))}")
    return float(theta), None


def _parse_llama3_rope(fields: Mapping[str, Any]) -> Llama3Rope:
    if sorted(fields) != sorted(_LLAMA3_FIELDS):
        raise EngineError(
            f"rope_type 'llama3' needs exactly {', '.join(_LLAMA3_FIELDS)}; "
            f"it has {', '.join(sorted(fields)) or 'none'}"
        )
    factor, low, high = (_parse_number(fields, name, float) for name in _LLAMA3_FIELDS[:3])
    return Llama3Rope(factor, low, high, _parse_number(fields, "original_max_position_embeddings"))
