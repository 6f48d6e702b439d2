"""Sizes of a new run that follow from its GPUs, where the user has set none.

Reads   the settings, the GPUs of this machine, config.json and the headers of the weight files
Gives   load_sized_config: settings whose config.toml records what was chosen; decide_shard
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.config import Config, load_config
from laminar.config.rollout import RolloutConfig
from laminar.engines.environment import count_free_replicas, gpus_per_replica
from laminar.engines.protocol import EngineError
from laminar.launch.memory_check import (
    MachineMemory,
    choose_shard,
    count_cache_tokens,
    estimate_memory,
    parse_machine,
    read_sizes,
    this_machine,
)
from laminar.tasks.data.hub import localize_model
from laminar.training.model.footprint import ModelSizes

MAX_SEQUENCES = 512  #: of a replica by default, as in the paper's runs
ASSUMED_GPU_BYTES = 40 << 30  #: of a GPU that cannot be asked: the least usual for training


def load_sized_config(
    sources: Sequence[str | Path | Mapping[str, Any]], overrides: Sequence[str] = ()
) -> Config:
    """Load a new run's settings, with defaults derived from the GPUs of this machine."""
    config = load_config(sources, overrides)
    if config.is_emulated or config.rollout.device == "cpu" or not (gpus := this_machine().gpus):
        return config
    defaults = derive_replicas(config, len(gpus)) | derive_sequences(config, min(gpus.values()))
    return load_config(sources, overrides, defaults=defaults)


def decide_shard(config: Config, nodes: int) -> Config:
    """Decide trainer.shard = "auto" for this machine, or without `nodes` here for one of Slurm."""
    if config.trainer.nodes == 1:
        return config
    asked, planned = config.slurm.gpus, config.run.planned_gpus
    assumed = MachineMemory(0, 0, {str(number): ASSUMED_GPU_BYTES for number in range(asked)})
    there = parse_machine(planned, key="run.planned_gpus") if planned else assumed
    machine = this_machine() if nodes else there
    return choose_shard(config, estimate_memory(config, max(nodes, 1), machine))


def derive_replicas(config: Config, gpus: int) -> dict[str, int]:
    """Return as many replicas as fit without the trainer's GPUs; none if machines are emulated."""
    count = count_free_replicas(gpus, config.trainer.ranks, gpus_per_replica(config))
    return {"rollout.replicas": count} if count and config.run.nodes == 1 else {}


def derive_sequences(
    config: Config, gpu_bytes: int, sizes: ModelSizes | None = None
) -> dict[str, int]:
    """Return the sequences that vLLM's cache holds; none for other engines, or unknown memory."""
    if config.rollout.engine != "vllm" or not (gpu_bytes or config.rollout.vllm.kv_cache_bytes):
        return {}
    try:
        sizes = sizes or read_sizes(localize_model(config).model.name)
    except EngineError:  # reported with its key by check_engine
        return {}
    count = choose_sequences(count_cache_tokens(config, sizes, gpu_bytes), config.max_model_len)
    return {"rollout.max_num_seqs": min(count, config.agents.max_sessions or count)}


def choose_sequences(cache_tokens: int, row_tokens: int) -> int:
    """Return how many sequences of at most `row_tokens` share a cache; the default at least.

    Each is counted as a quarter: the paper's responses hold 15 % of the longest on average, and
    with a full cache vLLM lets the newest wait."""
    return max(RolloutConfig().max_num_seqs, min(cache_tokens * 4 // row_tokens, MAX_SEQUENCES))
