"""What can be said about engine and model without starting anything.

Reads   rollout.engine and its settings, model.name's config.json
Raises  ConfigError with one sentence that names the value and the fix

Without torch, except where a machine's GPUs have to be counted: it is asked before a run starts.
"""

from __future__ import annotations

import importlib.util

from laminar.config import Config, ConfigError
from laminar.engines.checkpoint_files import check_weight_files
from laminar.engines.hf_config import parse_hf_config, read_hf_config
from laminar.engines.protocol import EngineError


def check_engine(config: Config) -> None:
    """The engine can run here, and has a place for every token of the longest sequence."""
    name = config.model.name
    try:
        hf_config = read_hf_config(name)
        if config.rollout.engine == "vllm":
            check_vllm(config)
            positions = hf_config.get("max_position_embeddings")
        else:
            positions = parse_hf_config(hf_config).max_positions
        check_weight_files(name)
    except EngineError as error:
        raise ConfigError(f"model.name = {name!r}: {error}") from None
    if positions and config.max_model_len > positions:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {config.max_model_len} is more "
            f"than the {positions} positions of model {name!r}; lower one of them"
        )


def check_vllm(config: Config) -> None:
    """It is installed, knows what is in `extra`, and has enough GPUs, if there are any."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'rollout.engine = "vllm", but vLLM is not installed here: pip install "laminar[vllm]", '
            "or see docs/engines.md for a machine without a GPU"
        )
    size = config.rollout.vllm.tensor_parallel_size
    if size > 1:
        import torch

        gpus = torch.cuda.device_count()
        if 0 < gpus < size:
            raise ConfigError(
                f"rollout.vllm.tensor_parallel_size = {size}, but this machine has {gpus} GPUs"
            )
