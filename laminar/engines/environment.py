"""What an engine's process needs before it begins: variables of its environment, and GPUs.

Reads   rollout.engine, rollout.threads, rollout.vllm.tensor_parallel_size
Gives   the same for the node that starts it; without torch, since a node has none
"""

from __future__ import annotations

from laminar.config import Config

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # a helper of the sampler would be compiled at the first token
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For vLLM; what a user has set stays."""


def environment(config: Config, gpus: bool) -> dict[str, str]:
    """Variables of a replica's process. Without GPUs, threads that wait for one another in a busy
    loop slow an engine many times as soon as anything else runs on the machine."""
    if config.rollout.engine != "vllm" or gpus:
        return {}
    return {"OMP_NUM_THREADS": str(config.rollout.threads), **CPU_ENVIRONMENT}


def gpus_per_replica(config: Config) -> int:
    """On one machine."""
    return config.rollout.vllm.tensor_parallel_size if config.rollout.engine == "vllm" else 1
