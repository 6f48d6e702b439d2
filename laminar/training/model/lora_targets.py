"""Choice of the matrices that get adapters, and other checks of adapters without torch.

Reads   the [lora] section, names and shapes of tensors
Gives   `choose_modules`, `module_of`, `sum_matrix_sizes`, `adapters_of`, `check_lora`; file names
Raises  ConfigError

The dry run and other checks use it before anything starts; lora.py then adds the adapters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec

from laminar.config import ConfigError
from laminar.config.training import LoraConfig
from laminar.run.command_line import with_extra

ADAPTER_DIR = "adapter"
ADAPTER_FILE = f"{ADAPTER_DIR}/adapter_model.safetensors"
ALL_LINEAR = "all-linear"
LAYER_PATTERN = re.compile(r"(?:^|\.)layers\.(\d+)\.")
WEIGHT_SUFFIX = ".weight"
EXPERTS = ".experts"
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")  #: in names of files
NEXT_TO_EXPERTS = {"gate_proj", "up_proj", "down_proj", "gate", "router"}
"""Modules without adapters in a model with experts: given one of these names, peft adapts the
experts, too, as one tensor, and their merged weights would be published under other names."""


def module_of(name: str) -> str:
    """Return a module's name within its layer, such as q_proj; empty: it belongs to no layer."""
    return name.rpartition(".")[2] if LAYER_PATTERN.search(name) else ""


def sum_matrix_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return by matrix name the inputs plus outputs of that matrix, summed over the layers.

    Matrices that cannot have adapters are left out."""
    found: dict[str, int] = {}
    excluded = NEXT_TO_EXPERTS if has_experts(shapes) else set()
    for name, shape in shapes.items():
        module = module_of(name.removesuffix(WEIGHT_SUFFIX))
        if name.endswith(WEIGHT_SUFFIX) and len(shape) == 2 and module and module not in excluded:
            found[module] = found.get(module, 0) + sum(shape)
    return found


def has_experts(names: Iterable[str]) -> bool:
    """Return whether these are tensors or modules of a mixture of experts."""
    return any(f"{name}.".find(f"{EXPERTS}.") >= 0 for name in names)


def choose_modules(lora: LoraConfig, there: Collection[str], *, experts: bool) -> list[str]:
    """Return the names of the modules that get adapters.

    `there`: all matrices of the layers that can have some; `experts`: whether experts are next to
    them."""
    if experts and lora.target_modules == [ALL_LINEAR]:
        names = ", ".join(f'"{name}"' for name in sorted(there))
        raise ConfigError(
            f'lora.target_modules = ["{ALL_LINEAR}"]: the experts of this model cannot have '
            f"adapters; set it to [{names}] or a part of these, or lora.rank to 0"
        )
    if not there:
        raise ConfigError(
            f"lora.rank = {lora.rank}: this model has no layers with linear matrices "
            "(layers.N.MODULE.weight) that could have adapters; set lora.rank to 0"
        )
    if lora.target_modules == [ALL_LINEAR]:
        return sorted(there)
    unknown = sorted(set(lora.target_modules) - set(there))
    if unknown:
        raise ConfigError(
            f"lora.target_modules has {unknown[0]!r}, but the layers of this model have "
            f"{', '.join(sorted(there))}: use some of these, or {ALL_LINEAR}"
        )
    return sorted(set(lora.target_modules))


def adapters_of(lora: LoraConfig) -> str:
    """Describe the adapters for a checkpoint, which fits no others; empty: none."""
    if not lora.rank:
        return ""
    modules = ", ".join(sorted(lora.target_modules))
    return f"adapters of rank {lora.rank} and alpha {lora.alpha:g} for {modules}"


def check_lora(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that this model can have the adapters of the section; `shapes`: of its tensors."""
    if find_spec("peft") is None:
        raise ConfigError(
            f"lora.rank = {lora.rank} needs peft, which is not installed: "
            f"{with_extra('lora')}; or set lora.rank to 0"
        )
    choose_modules(lora, sum_matrix_sizes(shapes), experts=has_experts(shapes))
