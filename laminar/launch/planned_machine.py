"""Machines that need not exist, as a plan describes them, and models without weights.

Reads   the words of --gpus; config.json of a model, from the hub if it has to
Gives   parse_gpus, describe_machine: a MachineMemory; read_planned_sizes: a model's sizes
Raises  ConfigError with one sentence
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from laminar.config import ConfigError
from laminar.engines.check import weight_shapes
from laminar.engines.hf_config import read_hf_config
from laminar.engines.protocol import EngineError
from laminar.launch.memory_check import MachineMemory
from laminar.tasks.data.hub import find_config_directory
from laminar.training.model.footprint import ModelSizes, sizes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GB = 10**9
GPUS_MAX = 64  #: of a machine
GPU_GB = {
    "A10": 24, "A100-40": 40, "A100-80": 80, "A6000": 48, "B200": 180, "H100": 80, "H20": 96,
    "H200": 141, "L4": 24, "L40S": 48, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32,
}  # fmt: skip
"""Memory of a GPU as its maker names it, which is never more than the driver reports."""
SIZE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
"""Fields of config.json for which transformers would take a default of another model."""


def parse_gpus(text: str, key: str = "--gpus") -> tuple[int, int]:
    """Return the number of GPUs and the bytes of each."""
    count, size = 0, 0.0
    if found := re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text):
        count, size = int(found[1]), float(found[2])
    elif found := re.fullmatch(r"(.+):(\d+)", text):
        known = {_simplify(name): gb for name, gb in GPU_GB.items()}
        if _simplify(found[1]) not in known:
            raise ConfigError(
                f"{key} = {text!r}: {found[1]} is not one of {', '.join(GPU_GB)}; give one of "
                "them, or number and memory in GB, such as 8x80"
            )
        count, size = int(found[2]), known[_simplify(found[1])]
    if not (0 < count <= GPUS_MAX and size):
        raise ConfigError(
            f"{key} = {text!r}: give number and memory in GB of the GPUs of a machine, such as "
            f"8x80, or name and number, such as H100:8, with 1 to {GPUS_MAX} GPUs"
        )
    return count, int(size * GB)


def describe_machine(gpus: tuple[int, int], host_gb: float) -> MachineMemory:
    """Return a machine with these GPUs; half of its memory, if known, is for /dev/shm."""
    count, size = gpus
    host = int(host_gb * GB)
    return MachineMemory(host, host // 2, {str(index): size for index in range(count)})


def read_planned_sizes(key: str, name: str) -> ModelSizes:
    """Return the sizes of a model that may have no weights; they are then by config.json alone."""
    directory = find_config_directory(key, name)
    try:
        config = _find_text_config(read_hf_config(directory))
        fields = json.loads(config.to_json_string(use_diff=False))
        try:
            return sizes_of(fields, weight_shapes(directory))
        except EngineError:  # no weights; a run's checks report damaged ones
            return sizes_of(fields, dict(_list_shapes(config)))
    except EngineError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from None


def _find_text_config(raw: dict[str, Any]) -> PretrainedConfig:
    """Return the decoder's part of a config.json; raise EngineError."""
    from transformers import CONFIG_MAPPING  # seconds to import

    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise EngineError(
            f"config.json has model_type = {kind!r}, which transformers does not know; give a "
            "model of transformers, or update it"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # each class checks its fields in its way
        raise EngineError(f"config.json is not one of {kind}: {_join_lines(error)}") from None
    text = config.get_text_config()
    given = raw if text is config else next((v for v in raw.values() if _is_of(v, text)), {})
    for name in SIZE_FIELDS:
        field = text.attribute_map.get(name, name)
        if getattr(type(text), field, None) is not None and given.get(field) is None:
            raise EngineError(
                f"config.json lacks {field}, without which the model has no size; add it, or "
                "download config.json again"
            )
    return text


def _is_of(value: Any, text: PretrainedConfig) -> bool:
    return isinstance(value, dict) and value.get("model_type") == text.model_type


def _list_shapes(config: PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a model that is not allocated."""
    import torch  # takes longer to load than all the rest
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each model builds its layers in its way
        raise EngineError(f"config.json describes no decoder: {_join_lines(error)}") from None
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split())


def _simplify(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
