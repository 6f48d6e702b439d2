"""A policy as a directory that from_pretrained loads: the export, and every checkpoint.

Reads   the model, and the tokenizer of the model it started from
Writes  safetensors, config, generation config, tokenizer files and chat template, in one rename

A directory that exists under its name is whole: everything is written and synced beside it first.
The files are written one by one because save_pretrained of a model refuses generation configs that
published models do ship (a temperature without do_sample), and a run must not fail at its end.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from laminar.config import ConfigError
from laminar.training.model import named_weights

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def export_hf(
    model: PreTrainedModel,
    tokenizer_source: str,
    directory: Path,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Write `model` to `directory`, float32; ConfigError when it exists, OSError from the disk.

    `tokenizer_source` is the model directory that the run's tokenizer came from. `tensors` take
    the place of the model's own, by the same names; `extra` are further files.
    """
    if directory.exists():
        raise ConfigError(f"export directory {directory} exists; remove it or give another path")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial")
    if partial.exists():  # an export that died half-way
        shutil.rmtree(partial)
    try:
        partial.mkdir()
        _copy_tokenizer(Path(tokenizer_source), partial)
        _save_model(model, dict(named_weights(model)) if tensors is None else tensors, partial)
        for name, content in (extra or {}).items():
            (partial / name).write_bytes(content)
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        partial.rename(directory)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise
    _sync(directory.parent)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """The files as they are: saving a loaded tokenizer may rewrite its rules."""
    for pattern in TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, directory / path.name)


def _save_model(model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Config, generation config and weights; a tied tensor once."""
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.to_json_file(directory / "generation_config.json")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path = directory / "model.safetensors"
    try:
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its own name for a disk that fails
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, f"{path}: {error}") from error
    path.chmod((directory / "config.json").stat().st_mode)  # it is written for its owner alone


def _sync(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
