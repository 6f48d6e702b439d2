"""The tokenizer of a model, its vocabulary size, and the ids that end a response.

Reads   tokenizer files, generation_config.json and config.json of a model directory
Gives   the tokenizer, its size and the end ids; raises ConfigError

A model names its end tokens in up to three places that need not agree: the tokenizer has one, the
generation config often a list (a chat model's turn end), the config sometimes yet another one.
Generation that stops only at some of them runs past the others, so the end ids are the union.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory; raise ConfigError."""
    from transformers import AutoTokenizer  # seconds to import: only for processes that tokenise

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # damaged files raise various types
        ours = isinstance(error, OSError | ValueError)
        reason = str(error).strip().splitlines()[0] if ours else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())
        raise ConfigError(
            f"the tokenizer of model {name!r} cannot be loaded: {reason}; "
            "give the directory of a model with tokenizer files"
        ) from error
    _check_files(name, tokenizer)
    return tokenizer


def _check_files(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model without vocabulary files, from which transformers makes an empty tokenizer."""
    files = tokenizer.vocab_files_names.values()
    if Path(name).is_dir() and files and not any(Path(name, file).is_file() for file in files):
        raise ConfigError(
            f"model {name!r} has no tokenizer: {', '.join(files)} are missing; copy the "
            "tokenizer's files into its directory"
        )


def get_tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one; some models have logits for further ids, without text."""
    return max(tokenizer.get_vocab().values()) + 1


def end_ids(name: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a response: of the tokenizer, generation config and config.

    Raises ConfigError if there is none, because no response would ever end by itself.
    """
    config = _model_json(name, "config.json")
    if config is None:
        raise ConfigError(f"model {name!r} has no config.json; model.name must be a whole model")
    generation = _model_json(name, "generation_config.json") or {}
    found = {
        *_as_ids(tokenizer.eos_token_id),
        *_as_ids(generation.get("eos_token_id")),
        *_as_ids(config.get("eos_token_id")),
    }
    if not found:
        raise ConfigError(
            f"model {name!r} has no end token; set eos_token in its tokenizer_config.json"
        )
    return frozenset(found)


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]


def _model_json(name: str, file: str) -> dict[str, Any] | None:
    """Return the content of a JSON file of the model, or None if there is no such file."""
    if not (path := Path(name, file)).is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object; restore the file of the model")
    return content
