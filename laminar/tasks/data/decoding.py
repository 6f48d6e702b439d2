"""Decoding of a run's token ids to text, for rewards and for human readers.

Reads   tokenizer.json of the run's model, or of a model that the run has written
Gives   make_decoder; make_response_decoder, the same without the end token, for reward functions;
        raises ConfigError if there is no tokenizer

Special tokens are kept: some models have `<think>` or `<answer>` among them, which rewards look
for, and only they reveal a template that was applied twice. The file is read with `tokenizers`
directly, because transformers takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.config import Config, ConfigError
from laminar.run.directory import CHECKPOINTS_DIR, EXPORT_DIR
from laminar.tasks.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"


def make_decoder(run_dir: Path, config: Config) -> Callable[[list[int]], str]:
    """Return a function from ids to text.

    Falls back to models written by the run, as the original may have moved.
    """
    if config.is_emulated:
        return lambda ids: f"{len(ids)} emulated tokens"
    written = [run_dir / EXPORT_DIR, *sorted((run_dir / CHECKPOINTS_DIR).glob("step_*"))]
    for directory in (Path(config.model.name), *written):
        if (directory / TOKENIZER_FILE).is_file():
            return _load_quick_decoder(directory / TOKENIZER_FILE)
    return _make_text_decoder(load_tokenizer(config.model.name))


def make_response_decoder(
    tokenizer: PreTrainedTokenizerBase, end_ids: Container[int]
) -> Callable[[list[int]], str]:
    """Return a function from the ids of a response to the text that rewards are given."""
    decode = _make_text_decoder(tokenizer)
    return lambda ids: decode(ids[:-1] if ids and ids[-1] in end_ids else ids)


def _make_text_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    core = getattr(tokenizer, "backend_tokenizer", None)
    return partial(_decode_ids, core) if core else lambda ids: str(tokenizer.decode(ids))


def _load_quick_decoder(file: Path) -> Callable[[list[int]], str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{file} is not a tokenizer: {error}; restore the file") from error
    return partial(_decode_ids, tokenizer)


def _decode_ids(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode ids; show ids without a token (some models have such logits) as numbers."""
    parts: list[str] = []
    known: list[int] = []
    for token in [*ids, -1]:
        if token >= 0 and tokenizer.id_to_token(token) is not None:
            known.append(token)
            continue
        parts.append(tokenizer.decode(known, skip_special_tokens=False))
        parts.append(f"<id {token}>" if token >= 0 else "")
        known = []
    return "".join(parts)
