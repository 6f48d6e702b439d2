"""A policy as a directory that from_pretrained loads: the export, and every checkpoint.

Reads   the model, and the tokenizer of the model it started from
Writes  config, generation config, tokenizer files and chat template; for a model with adapters also
        the configuration in adapter/, as peft reads it. Ranks write the weights

The files are written one by one because a model's save_pretrained refuses generation configs that
published models do ship (a temperature without do_sample), and a run must not fail at its end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from laminar.config.families import TEXT_FIELDS
from laminar.training.model import lora

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
)


def write_all_but_weights(
    model: PreTrainedModel, tokenizer_source: str, directory: Path, extra: Mapping[str, bytes]
) -> None:
    _copy_tokenizer(Path(tokenizer_source), directory)
    if lora.find_adapted_layers(model):
        lora.write_config(model, tokenizer_source, directory)
    settings = Path(tokenizer_source) / "config.json"
    if TEXT_FIELDS in json.loads(settings.read_bytes()):  # its files have their names
        shutil.copyfile(settings, directory / settings.name)
    else:
        model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.to_json_file(directory / "generation_config.json")
    for name, content in extra.items():
        (directory / name).write_bytes(content)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the files unchanged: saving a loaded tokenizer may rewrite its rules."""
    for pattern in TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, directory / path.name)
