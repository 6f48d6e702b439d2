"""Upper bound of the number of tokens of a text, without encoding it.

Reads   the parts of a tokenizer: normalizer, pre-tokenizer, model
Gives   token_bound: a function of a text, or None for an unsupported kind of tokenizer

Byte-level BPE tokenizers (GPT-2, Llama 3, Qwen, DeepSeek, ...) are supported. Their pre-tokenizers
only cut a text into pieces of its UTF-8 bytes, each byte becomes a symbol of the alphabet, and BPE
only joins symbols; an added token replaces at least one byte. So the tokens are at most as many as
the bytes after normalization, plus those that the post-processor adds. NFC leaves ASCII unchanged
and at most triples the length of a UTF-8 text (Unicode FAQ, Normalization, "maximum expansion
factor"). The whole alphabet has ids, so a text that is not empty has at least one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NFC_GROWTH = 3


def token_bound(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int] | None:
    """Return a function from text to its maximum number of tokens, or None if unsupported."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.padding is not None or not _is_byte_level_bpe(backend):
        return None
    if backend.normalizer is not None and _list_steps(backend.normalizer) != [{"type": "NFC"}]:
        return None
    growth = 1 if backend.normalizer is None else NFC_GROWTH
    special = tokenizer.num_special_tokens_to_add()

    def most(text: str) -> int:
        return special + (len(text) if text.isascii() else growth * len(text.encode()))

    return most


def _is_byte_level_bpe(backend: Any) -> bool:
    from tokenizers import models, pre_tokenizers

    if not isinstance(backend.model, models.BPE) or backend.pre_tokenizer is None:
        return False
    *cuts, last = _list_steps(backend.pre_tokenizer)
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not all(p["type"] == "Digits" or _keeps_all(p) for p in cuts):
        return False
    return all(backend.token_to_id(c) is not None for c in pre_tokenizers.ByteLevel.alphabet())


def _keeps_all(cut: dict[str, object]) -> bool:
    return cut["type"] == "Split" and cut["behavior"] != "Removed"


def _list_steps(component: Any) -> list[dict[str, object]]:
    """Return the steps of a component as in tokenizer.json."""
    state = json.loads(component.__getstate__())
    steps: list[dict[str, object]] = (
        state.get("pretokenizers") or state.get("normalizers") or [state]
    )
    return steps
