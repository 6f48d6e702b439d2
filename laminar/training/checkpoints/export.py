"""A policy as a directory that from_pretrained loads: the export, and every checkpoint.

Reads   the model, and the tokenizer of the model it started from
Writes  safetensors, config, generation config, tokenizer files and chat template; for a model with
        adapters, which is merged there, also adapter/, as peft reads it

The files are written one by one because a model's save_pretrained refuses generation configs that
published models do ship (a temperature without do_sample), and a run must not fail at its end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from laminar.config.families import TEXT_FIELDS
from laminar.training import shared_safetensors
from laminar.training.checkpoints.checkpoint import save_tensors
from laminar.training.checkpoints.file_digests import MODEL_FILE
from laminar.training.model import lora
from laminar.training.model.lora_targets import ADAPTER_FILE
from laminar.training.model.policy import iter_weight_rows, weight_forms
from laminar.training.shared_safetensors import WrittenFiles

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


def write_model(
    model: PreTrainedModel,
    tokenizer_source: str,
    directory: Path,
    tensors: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, bytes] | None = None,
    adapters: Mapping[str, Tensor] | None = None,
) -> WrittenFiles:
    """Write `model` into `directory`, float32, and return digests; OSError from the disk.

    `tokenizer_source` is the model directory that the run's tokenizer came from. `tensors` and
    `adapters` replace the model's own, by the same names; `extra` are further files.
    """
    write_all_but_weights(model, tokenizer_source, directory, extra or {})
    found = dict(lora.file_tensors(model)) if adapters is None else adapters
    written = {ADAPTER_FILE: save_tensors(directory / ADAPTER_FILE, found)} if found else {}
    path = directory / MODEL_FILE
    if tensors is not None:
        return written | {MODEL_FILE: save_tensors(path, tensors)}
    forms = weight_forms(model)
    shared_safetensors.create_file(path, forms)
    weights = iter_weight_rows(model)
    return written | {MODEL_FILE: shared_safetensors.write_rows(path, forms, weights)}


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
