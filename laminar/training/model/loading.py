"""Models built without memory, then filled from slices of their files.

Reads   a model directory: config.json, safetensors by slices
Gives   `build_meta_model`, `fill_model`, `copy_rows`, `make_load_error`
Raises  ConfigError for a checkpoint that does not fill the model exactly

One process and each of several ranks load alike: every tensor is allocated, its rows here are
copied from the files, and what no file has is computed by transformers. Of a multimodal checkpoint
only the language model is built.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from laminar.config import ConfigError
from laminar.run.user_file import get_first_line
from laminar.run.work_counter import count_work
from laminar.training.model.file_tensors import (
    find_file_parts,
    group_tied,
    iter_file_rows,
    note_file_prefix,
)
from laminar.training.model.weight_files import check_loaded, list_unused, open_slices
from laminar.training.ranks import SINGLE_RANK, Ranks
from laminar.training.shared_safetensors import DTYPES, Rows

CPU = torch.device("cpu")


def build_meta_model(
    name: str, kind: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """Build a language model without memory for its tensors; raises ConfigError."""
    try:
        whole = AutoConfig.from_pretrained(name)
        config = whole.get_text_config()
        config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
        for key, value in options.items():
            setattr(config, key, value)
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
        with ExitStack() as files:
            note_file_prefix(model, open_slices(Path(name), files))
    except (OSError, SafetensorError, ValueError) as error:
        raise make_load_error(name, error) from error
    with suppress(OSError):  # optional in a model directory
        model.generation_config = GenerationConfig.from_pretrained(name)
    find_file_parts(model)
    model.eval()
    return model


def make_load_error(name: str, error: Exception) -> ConfigError:
    """Make the error for a directory from which no model can be loaded."""
    return ConfigError(
        f"model {name!r} cannot be loaded: {get_first_line(error)}; give the directory of a "
        "causal LM with safetensors weights"
    )


def fill_model(
    name: str,
    model: PreTrainedModel,
    device: torch.device,
    *,
    offload: bool = False,
    but: tuple[str, ...] = (),
    ranks: Ranks = SINGLE_RANK,
) -> None:
    """Fill a model on the meta device; `but`: name prefixes of tensors to leave out.

    `offload`: allocate parameters in host memory, and buffers on the device."""
    model.to_empty(device="cpu" if offload else device)
    model.tie_weights()
    _make_buffers(name, model, device)
    try:
        _fill_tensors(name, model, but, ranks)
    except (OSError, SafetensorError, ValueError) as error:
        raise make_load_error(name, error) from error


@torch.no_grad()
def _make_buffers(name: str, model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that are in no file: after `to_empty` their content is undefined.

    transformers initializes tensors that are not marked, module by module."""
    saved = model.state_dict(keep_vars=True)
    for tensor in saved.values():
        tensor._is_hf_initialized = True
    for path, module in list(model.named_modules()):
        buffers = dict(module.named_buffers(path, recurse=False))
        lost = {key: buffer for key, buffer in buffers.items() if key not in saved}
        for buffer in lost.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else -1)
        if lost:
            model._init_weights(module)
        for key, buffer in lost.items():
            if not buffer.is_floating_point() or buffer.isnan().any():
                raise ConfigError(
                    f"model {name!r} is a {type(model).__name__}, and transformers does not "
                    f"compute its {key}, which is in no file; use another model"
                )
            module.register_buffer(key.rpartition(".")[2], buffer.to(device), persistent=False)


@torch.no_grad()
def _fill_tensors(name: str, model: PreTrainedModel, but: tuple[str, ...], ranks: Ranks) -> None:
    """Fill every tensor from the files, with none left over, except names that start with `but`."""
    parts = find_file_parts(model)
    with ExitStack() as files:
        slices = open_slices(Path(name), files).items()
        saved = {key: found for key, found in slices if not key.startswith(but)}
        lacking = []
        for names, tensor in group_tied(model):
            if names[0].startswith(but):
                continue
            known = next((n for n in names if parts[n][0].name in saved), names[0])
            for key, rows in iter_file_rows(parts[known], tensor):
                if key not in saved:
                    lacking.append(key)
                else:
                    copy_rows(key, rows, saved[key], ranks, cast=True)
            for part in (part for key in names for part in parts[key]):
                saved.pop(part.name, None)  # a tied tensor may be stored under each of its names
    check_loaded(name, lacking, list_unused(model, saved))


def copy_rows(
    name: str, rows: Rows, saved: Any, ranks: Ranks = SINGLE_RANK, *, cast: bool = False
) -> None:
    """Copy this rank's rows of a tensor from a slice of a file or the first node; read no others.

    Raises ValueError for another shape and, unless `cast`, for another element type.
    """
    dtype = DTYPES[rows.data.dtype]
    shape, its = tuple(saved.get_shape()), saved.get_dtype()
    if shape != rows.shape or (its != dtype and not cast):
        raise ValueError(f"{name!r} is {its} {shape}, not {dtype} of shape {rows.shape}")
    if rows.data.numel() and ranks.reads_files:
        rows.data.copy_(saved[rows.first : rows.first + len(rows.data)] if shape else saved[...])
    ranks.share_rows(rows.data)
    count_work()
