"""Low-rank adapters beside the matrices of a model's layers (LoRA, Hu et al. 2021), made by peft.

Reads   the [lora] section; a model in memory, or on the meta device
Writes  the model, in place: each chosen matrix becomes a layer of peft, and only A and B are
        trained; the files of `adapter/`, as peft reads them
Gives   `inject`, `start`; what a weight is with its adapter, `merged`; `adapters_off`
Raises  ConfigError

A layer gives base(x) + alpha / rank * B(A(x)). B begins with zeros, so that a model with new
adapters is its base. The base is never written to: its weight with the adapter is worked out anew
whenever it is published or saved, one tensor at a time, in float32. The numbers of A are a function
of the seed and of its name, so that every process of a trainer, and `laminar retrain`, begins with
the same. peft is an extra, and is imported by nothing but this file.
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
from laminar.training.model.lora_targets import ADAPTER_DIR, choose_modules, module_of
from laminar.training.shared_safetensors import rows_of

ADAPTER_NAME = "default"
"""What peft calls the only adapter of a model."""
_PARTS = re.compile(rf"\.lora_[AB]\.{ADAPTER_NAME}\.")
PEFT_PREFIX = "base_model.model."
"""In front of every name in an adapter's file, of the wrapper that peft puts around a model."""


def inject_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Put adapters into the model; nothing else of it is trained from here on."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    found = {module_of(name) for name, module in model.named_modules() if _is_matrix(module)}
    asked = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(choose_modules(lora, found - {""})),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(asked, model, ADAPTER_NAME)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"lora.target_modules = {lora.target_modules}: peft cannot put an adapter there "
            f"({reason}); name linear layers of this model"
        ) from error
    for _, parameter in list_adapter_parameters(model):
        parameter.data = parameter.data.to(trained_type(parameter.dtype))  # peft took the base's


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Give new adapters their first numbers: B zeros, A those of nn.Linear."""
    for name, parameter in list_adapter_parameters(model):
        shape, first, own = rows_of(parameter)
        if ".lora_B." in name:
            own.zero_()
            continue
        generator = torch.Generator().manual_seed(
            xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1
        )
        whole = nn.init.kaiming_uniform_(torch.empty(shape), math.sqrt(5), generator=generator)
        own.copy_(whole[first : first + len(own)])


def trained_type(dtype: torch.dtype) -> torch.dtype:
    """What adapters, and weights merged with them, are of beside a base of this type."""
    return torch.promote_types(dtype, torch.float32)


def find_adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of peft by their names in the model; empty: it has no adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def list_adapter_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All A and B, by their names in the model."""
    return [(name, p) for name, p in model.named_parameters() if _PARTS.search(name)]


def base_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the tensors of a model those that it has without adapters, under the names of then."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if not _PARTS.search(name)
    }


@torch.no_grad()
def merge_adapter(layer: Any) -> Tensor:
    """The matrix of a layer with its adapter, float32 and not in place; of one in rows of ranks,
    which all ask together, rows."""
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
    # The sum of -0.0 and nothing would be 0.0, which are other bytes.
    return torch.where(change == 0, base.to(change.dtype), change + base)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base does. peft's own switch also says that adapters
    are not to be trained, in the middle of a step."""
    found = find_adapted_layers(model).values()
    for layer in found:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in found:
            layer._disable_adapters = False


def file_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All A and B, by their names in an adapter's file."""
    for name, parameter in list_adapter_parameters(model):
        yield PEFT_PREFIX + name.replace(f".{ADAPTER_NAME}.", "."), parameter.detach()


def write_config(model: Any, base: str, directory: Path) -> None:
    """Begin the adapter's directory in that of a model: all but its tensors. `base`: the name of
    the model that it belongs to."""
    config = model.peft_config[ADAPTER_NAME]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory / ADAPTER_DIR)
