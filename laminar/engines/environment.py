"""Environment of an engine's process: variables, modules to import, GPUs.

Reads   rollout.engine, rollout.threads, rollout.vllm.tensor_parallel_size
Gives   the same for the node that starts it; without torch, which a node does not load
"""

from __future__ import annotations

import os
from pathlib import Path

from laminar.config import Config

VLLM_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch",  # else it reports missing Triton at each start
    "TQDM_DISABLE": "1",  # progress bars of CUDA graph capture would tear the live panel
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else the query for GPUs prevents forking the core
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_MODULES = (
    "laminar.engines.vllm.start",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
)
"""Modules that the processes of a vLLM replica import, its core included."""
VLLM_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first token compiles a helper of the sampler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def get_vllm_environment(gpus: bool) -> dict[str, str]:
    """Return variables that vLLM reads on import; values that the user has set take precedence."""
    return VLLM_ENVIRONMENT if gpus else VLLM_ENVIRONMENT | VLLM_CPU_ENVIRONMENT


def build_environment(config: Config, gpus: bool) -> dict[str, str]:
    """Build the variables of a replica's process.

    Without GPUs the number of threads is limited: threads that wait for one another in a busy
    loop slow an engine many times as soon as anything else runs on the machine."""
    if config.rollout.engine != "vllm":
        return {}
    threads = {} if gpus else {"OMP_NUM_THREADS": str(config.rollout.threads)}
    return threads | get_vllm_environment(gpus)


def engine_modules(config: Config, gpus: bool) -> tuple[str, ...]:
    """Return modules that the engine imports in addition to those of the rollout actor."""
    if config.rollout.engine != "vllm":
        return ()
    return (*VLLM_MODULES, f"vllm.v1.worker.{'gpu' if gpus else 'cpu'}_worker")


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine that may be used, as CUDA names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    devices = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(devices, key=int)


def gpus_per_replica(config: Config) -> int:
    """Return the number of GPUs of a replica, all on one machine."""
    return config.rollout.vllm.tensor_parallel_size if config.rollout.engine == "vllm" else 1
