"""What an engine's process needs before it begins: variables of its environment, modules, GPUs.

Reads   rollout.engine, rollout.threads, rollout.vllm.tensor_parallel_size
Gives   the same for the node that starts it; without torch, since a node has none
"""

from __future__ import annotations

import os
from pathlib import Path

from laminar.config import Config

VLLM_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch",  # else it says that there is no Triton, at each start
    "TQDM_DISABLE": "1",  # its bars while CUDA graphs are captured would tear the live panel
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else asking for GPUs keeps the core from being forked
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_MODULES = (
    "laminar.engines.vllm.start",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
)
"""What the processes of a vLLM replica import, its core included."""
VLLM_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # a helper of the sampler would be compiled at the first token
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def get_vllm_environment(gpus: bool) -> dict[str, str]:
    """What vLLM reads when it is imported; what a user has set stays."""
    return VLLM_ENVIRONMENT if gpus else VLLM_ENVIRONMENT | VLLM_CPU_ENVIRONMENT


def build_environment(config: Config, gpus: bool) -> dict[str, str]:
    """Variables of a replica's process. Without GPUs, threads that wait for one another in a busy
    loop slow an engine many times as soon as anything else runs on the machine."""
    if config.rollout.engine != "vllm":
        return {}
    threads = {} if gpus else {"OMP_NUM_THREADS": str(config.rollout.threads)}
    return threads | get_vllm_environment(gpus)


def engine_modules(config: Config, gpus: bool) -> tuple[str, ...]:
    """What the engine imports sooner or later, besides the modules of the rollout actor."""
    if config.rollout.engine != "vllm":
        return ()
    return (*VLLM_MODULES, f"vllm.v1.worker.{'gpu' if gpus else 'cpu'}_worker")


def visible_gpus() -> list[str]:
    """The GPUs of this machine that we may use, by the names that CUDA takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    devices = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(devices, key=int)


def gpus_per_replica(config: Config) -> int:
    """How many GPUs of one machine a replica has."""
    return config.rollout.vllm.tensor_parallel_size if config.rollout.engine == "vllm" else 1
