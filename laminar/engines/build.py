"""Construction of a running engine from the configuration.

Reads   rollout.engine and its settings, model.name's config.json, weights.dtype
Gives   a ReplicaEngine without weights; ConfigError for a model that it cannot run

No other file distinguishes the kinds of engines.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path

import torch

from laminar.config import Config, ConfigError
from laminar.engines.check import check_vllm
from laminar.engines.hf_config import read_hf_config
from laminar.engines.protocol import EngineError, ReplicaEngine, TokenDelta
from laminar.engines.runner import EngineRunner
from laminar.engines.torch.engine import TorchEngine


async def start_engine(
    config: Config,
    vocab_limit: int,
    seed: int,
    on_deltas: Callable[[list[TokenDelta]], None],
    output: Path | None = None,
) -> ReplicaEngine:
    """Start the engine of one replica; ids at or above `vocab_limit` are never sampled.

    `seed` is for engines that draw by themselves; the embedded one draws from each request's.
    `output`: the file for what the engine's child processes print.
    """
    if config.rollout.engine == "vllm":
        check_vllm(config)
        # Importing vLLM takes seconds, in which this process must send heartbeats.
        start = await asyncio.to_thread(importlib.import_module, "laminar.engines.vllm.start")
        engine: ReplicaEngine = await start.start_vllm(
            config, get_engine_dtype(config), vocab_limit, seed, on_deltas, output
        )
        return engine
    torch_engine = await asyncio.to_thread(_torch_engine, config, vocab_limit)
    return EngineRunner(torch_engine, on_deltas, asyncio.get_running_loop())


def _resolve_device(config: Config) -> str:
    if config.rollout.device != "auto":
        return config.rollout.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _torch_engine(config: Config, vocab_limit: int) -> TorchEngine:
    rollout, device = config.rollout, _resolve_device(config)
    if device == "cpu":
        torch.set_num_threads(rollout.threads)
    try:
        hf_config = read_hf_config(config.model.name)
        vocab = int(hf_config.get("vocab_size", vocab_limit))
        return TorchEngine(
            hf_config,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=config.max_model_len,
            dtype=getattr(torch, get_engine_dtype(config)),
            device=device,
            vocab_limit=min(vocab_limit, vocab),
        )
    except EngineError as error:
        raise ConfigError(f"model.name = {config.model.name!r}: {error}") from error


def get_engine_dtype(config: Config) -> str:
    """Return the type that the engine computes in on this machine, as torch names it."""
    for name in (config.rollout.dtype, config.weights.dtype):
        if name != "auto":
            return name
    return "bfloat16" if _resolve_device(config) == "cuda" else "float32"
