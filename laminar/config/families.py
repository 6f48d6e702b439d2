"""The families of models that were tried in whole, one entry each.

Gives   Family, FAMILIES, `get_family`; `merge_text_fields`, `select_text_tensors`

An entry has what neither config.json nor transformers tells: which tensors of the files a run
leaves out, and what trainer and engines do differently. Class, layers, windows, sinks and rotary
scaling come from transformers by model_type. A family without an entry works if it needs none of
this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")
TEXT_FIELDS = "text_config"
"""Field of a multimodal config.json that has the fields of its language model."""
COMPUTED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"(^|\.)mtp\.")
"""Tensors in files of any family that are neither trained nor published: some that transformers
computes, and heads that predict several tokens."""
TEXT_PREFIX = "model."
"""Prefix of the names of a language model's layers in transformers."""
EMBEDDING_NAME = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    types: tuple[str, ...]  #: model_type in config.json: of whole checkpoints, of language models
    torch_engine: bool = False  #: whether engines/torch/model.py computes it
    shares_prompts: bool = False  #: whether its attention is that of shared_prefix_attention.py
    prefixes: tuple[str, ...] = ()  #: of the language model in multimodal files; else TEXT_PREFIX
    left_out: tuple[str, ...] = ()  #: patterns of tensors in the files that are not trained
    logit_cap: str = ""  #: field of config.json: logits become cap * tanh(logits / cap)
    vllm_copies: str = ""  #: pattern of tensors that vLLM's class copies without a weight loader


FAMILIES = (
    Family(name="Qwen2", types=("qwen2",), torch_engine=True, shares_prompts=True),
    Family(name="Qwen3", types=("qwen3",), torch_engine=True, shares_prompts=True),
    Family(name="Llama 3", types=("llama",), torch_engine=True, shares_prompts=True),
    Family(name="Mistral", types=("mistral",), shares_prompts=True),
    Family(name="OLMo 3", types=("olmo3",)),
    Family(name="SmolLM3", types=("smollm3",)),
    Family(name="Phi-3, Phi-4", types=("phi3",)),
    Family(
        name="Gemma 3",
        types=("gemma3", "gemma3_text"),
        prefixes=("language_model.model.", "model.language_model."),
        left_out=(r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\."),
        logit_cap="final_logit_softcapping",
    ),
    Family(
        name="Gemma 4",
        types=("gemma4", "gemma4_text"),
        prefixes=("model.language_model.",),
        left_out=(r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\.",),
        logit_cap="final_logit_softcapping",
    ),
    Family(name="gpt-oss", types=("gpt_oss",), vllm_copies=r"\.experts\.|\.sinks$"),
    Family(name="Qwen3-MoE", types=("qwen3_moe",), shares_prompts=True),
    Family(name="GLM-4-MoE-lite", types=("glm4_moe_lite",)),
    Family(
        name="Qwen3.5",
        types=("qwen3_5", "qwen3_5_text"),
        prefixes=("model.language_model.",),
        left_out=(r"^model\.visual\.",),
    ),
)
_BY_TYPE = {kind: family for family in FAMILIES for kind in family.types}


def get_family(model_type: object) -> Family:
    """Return the entry of a model_type; without one, an entry of defaults."""
    kind = str(model_type)
    return _BY_TYPE.get(kind) or Family(name=kind, types=(kind,))


def merge_text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a language model: those of a multimodal config.json with its own.

    Whether the head is the embedding is a property of the whole model, as is its type."""
    text = fields.get(TEXT_FIELDS)
    if not isinstance(text, dict):
        return dict(fields)
    whole = {k: fields[k] for k in ("model_type", "tie_word_embeddings") if k in fields}
    return {**fields, **text, **whole}


def find_text_prefix(family: Family, names: Mapping[str, Any]) -> str:
    """Return the prefix that the files have in place of TEXT_PREFIX."""
    found = (prefix for prefix in family.prefixes if prefix + EMBEDDING_NAME in names)
    return next(found, TEXT_PREFIX)


def remove_text_prefix(family: Family, name: str) -> str:
    """Return the name that a tensor of the files has in a model of the language model alone."""
    found = (prefix for prefix in family.prefixes if name.startswith(prefix))
    prefix = next(found, None)
    return name if prefix is None else TEXT_PREFIX + name.removeprefix(prefix)


def select_text_tensors(model_type: object, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Select the tensors of the files, by name, that are not known to be left out."""
    ignored = re.compile("|".join((*COMPUTED, *get_family(model_type).left_out)))
    return {name: tensor for name, tensor in tensors.items() if not ignored.search(name)}
