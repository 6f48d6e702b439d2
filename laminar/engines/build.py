"""From the configuration to an engine.

Reads   model.name's config.json, rollout.*, weights.dtype
Gives   an Engine without weights; ConfigError when the model is not one that it can run
"""

from __future__ import annotations

import torch

from laminar.config import Config, ConfigError
from laminar.engines.hf_config import read_hf_config
from laminar.engines.protocol import Engine, EngineError
from laminar.engines.torch_engine import TorchEngine


def build_engine(config: Config, vocab_limit: int) -> Engine:
    """The engine of one replica; ids at or above `vocab_limit` are never sampled."""
    rollout = config.rollout
    device = rollout.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = rollout.dtype if rollout.dtype != "auto" else config.weights.dtype
    if name == "auto":
        name = "bfloat16" if device == "cuda" else "float32"
    if device == "cpu":
        torch.set_num_threads(rollout.threads)
    try:
        hf_config = read_hf_config(config.model.name)
        vocab = int(hf_config.get("vocab_size", vocab_limit))
        return TorchEngine(
            hf_config,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=config.max_model_len,
            dtype=getattr(torch, name),
            device=device,
            vocab_limit=min(vocab_limit, vocab),
        )
    except EngineError as error:
        raise ConfigError(f"model.name = {config.model.name!r}: {error}") from error
