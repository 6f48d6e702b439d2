"""Low-rank adapters for the matrices of a model's layers (LoRA, Hu et al. 2021), made by peft.

Reads   the [lora] section; a model in memory, or on the meta device
Writes  the model, in place: each chosen matrix becomes a layer of peft, and only A and B are
        trained; the files of `adapter/`, as peft reads them
Gives   `inject_adapters`, `initialize_adapters`; merged weights: `merge_adapter`;
        `disable_adapters`
Raises  ConfigError

A layer computes base(x) + alpha / rank * B(A(x)). B starts as zeros, so that a model with new
adapters equals its base. The base is never written to: whenever a weight is published or saved, it
is merged with its adapter, one tensor at a time, in float32. A's initial values depend on the seed
and its name alone, so that every process of a trainer, and `laminar retrain`, starts from the same
values. peft is an extra; only this file imports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laminar.config import ConfigError
from laminar.config.training import LoraConfig
from laminar.run.user_file import get_first_line
from laminar.training.model.lora_targets import (
    ADAPTER_DIR,
    NEXT_TO_EXPERTS,
    choose_modules,
    has_experts,
    module_of,
)
from laminar.training.shared_safetensors import rows_of

ADAPTER_NAME = "default"
"""peft's name for the only adapter of a model."""
_PARTS = re.compile(rf"\.lora_[AB]\.{ADAPTER_NAME}\.")
PEFT_PREFIX = "base_model.model."
"""Prefix of every name in an adapter's file, from the wrapper that peft puts around a model."""


def inject_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Put adapters into the model; from here on nothing else of it is trained."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    modules = dict(model.named_modules())
    found = {module_of(name) for name, module in modules.items() if _is_matrix(module)}
    if experts := has_experts(modules):
        found -= NEXT_TO_EXPERTS
    asked = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=choose_modules(lora, found - {""}, experts=experts),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(asked, model, ADAPTER_NAME)
    except ValueError as error:
        raise ConfigError(
            f"lora.target_modules = {lora.target_modules}: peft cannot put an adapter there "
            f"({get_first_line(error)}); name linear layers of this model"
        ) from error
    for _, parameter in list_adapter_parameters(model):
        parameter.data = parameter.data.to(trained_type(parameter.dtype))  # peft took the base's


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Initialize new adapters: B as zeros, A as nn.Linear does."""
    for name, parameter in list_adapter_parameters(model):
        shape, first, own, _ = rows_of(parameter)
        if ".lora_B." in name:
            own.zero_()
            continue
        generator = torch.Generator().manual_seed(
            xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1
        )
        whole = nn.init.kaiming_uniform_(torch.empty(shape), math.sqrt(5), generator=generator)
        own.copy_(whole[first : first + len(own)])


def trained_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of adapters on a base of this type, and of weights merged with them."""
    return torch.promote_types(dtype, torch.float32)


def find_adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of peft by their names in the model; empty: it has no adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def list_adapter_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all A and B, by their names in the model."""
    return [(name, p) for name, p in model.named_parameters() if _PARTS.search(name)]


def base_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of the model without adapters, under their names there."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if not _PARTS.search(name)
    }


@torch.no_grad()
def merge_adapter(layer: Any) -> Tensor:
    """Return the matrix of a layer merged with its adapter, float32 and a new tensor.

    If it is sharded the result is too, and the call is collective."""
    base, scale = layer.base_layer.weight, layer.scaling[ADAPTER_NAME]
    a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    if not isinstance(base, DTensor):
        return _merge_matrices(base, a, b, scale)
    own = _merge_matrices(base.to_local(), a.full_tensor(), b.to_local(), scale)
    return DTensor.from_local(
        own,
        base.device_mesh,
        base.placements,
        run_check=False,
        shape=base.shape,
        stride=base.stride(),
    )


def _merge_matrices(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    change = (b @ a) * scale
    # -0.0 + 0.0 would be 0.0, which has other bytes.
    return torch.where(change == 0, base.to(change.dtype), change + base)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Have the model compute what its base does, within the context.

    peft's own switch would also mark adapters as not trained, in the middle of a step."""
    found = find_adapted_layers(model).values()
    for layer in found:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in found:
            layer._disable_adapters = False


def file_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all A and B, by their names in an adapter's file."""
    for name, parameter in list_adapter_parameters(model):
        yield PEFT_PREFIX + name.replace(f".{ADAPTER_NAME}.", "."), parameter.detach()


def write_config(model: Any, base: str, directory: Path) -> None:
    """Write the adapter's directory, all but its tensors; `base`: the name of the base model."""
    config = model.peft_config[ADAPTER_NAME]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory / ADAPTER_DIR)
