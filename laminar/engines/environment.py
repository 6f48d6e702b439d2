"""Environment of an engine's process: variables, modules to import, GPUs.

Reads   rollout.engine, rollout.threads, rollout.vllm.tensor_parallel_size
Gives   the same for the node that starts it; without torch, which a node does not load
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from laminar.config import Config, ConfigError

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
BFLOAT16_CAPABILITY = (8, 0)
MIN_DRIVERS = {"12": 525, "13": 580}  #: oldest driver for each major version of CUDA
ASK_S = 20.0  #: timeout of nvidia-smi, which is slow on a machine whose GPUs sleep
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


class Gpu(NamedTuple):
    """A GPU as its driver describes it."""

    number: str
    uuid: str
    name: str
    capability: tuple[int, int]
    driver: str


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine that may be used, as CUDA names them."""
    devices = (path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return name_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), devices)


def name_gpus(given: str | None, devices: Iterable[str]) -> list[str]:
    """Name the GPUs: as CUDA_VISIBLE_DEVICES does, else by their number.

    CUDA counts the devices of a container from 0, whatever the names of their files are.
    """
    if given is None:
        return [str(index) for index, _ in enumerate(devices)]
    names = (name.strip() for name in given.split(",") if name.strip())
    return list(takewhile(lambda name: name not in ("-1", "NoDevFiles"), names))


def list_gpus() -> list[Gpu]:
    """Return the GPUs that may be used; none if the driver gives no answer."""
    fields = "index,uuid,name,compute_cap,driver_version"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, timeout=ASK_S, check=True).stdout
        found = parse_gpus(text.decode())
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    names = visible_gpus()
    return [gpu for gpu in found if any(gpu.uuid.startswith(n) or gpu.number == n for n in names)]


def parse_gpus(text: str) -> list[Gpu]:
    """Parse the lines of nvidia-smi; raise ValueError."""
    found = []
    for line in text.splitlines():
        number, uuid, name, capability, driver = line.split(", ")
        major, minor = map(int, capability.split("."))
        found.append(Gpu(number, uuid, name, (major, minor), driver))
    return found


def check_capability(config: Config, gpus: Iterable[Gpu]) -> None:
    """Refuse a GPU without bfloat16, unless the run uses float32 throughout; raise ConfigError."""
    types = (config.trainer.dtype, config.weights.dtype, config.rollout.dtype)
    old = next((gpu for gpu in gpus if gpu.capability < BFLOAT16_CAPABILITY), None)
    if old is None or types == ("float32",) * 3:
        return
    raise ConfigError(
        f"GPU {old.number} of this machine is a {old.name} of compute capability "
        f"{old.capability[0]}.{old.capability[1]}, and bfloat16 needs {BFLOAT16_CAPABILITY[0]}.0 "
        "or later; leave it out by CUDA_VISIBLE_DEVICES, or set trainer.dtype, weights.dtype and "
        "rollout.dtype to float32"
    )


def check_driver(cuda: str | None, driver: str) -> None:
    """Check that a driver runs programs of this CUDA version; raise ConfigError."""
    needed = MIN_DRIVERS.get((cuda or "").partition(".")[0], 0)
    if int(driver.partition(".")[0]) < needed:
        raise ConfigError(
            f"the NVIDIA driver {driver} of this machine is too old: PyTorch was built for CUDA "
            f"{cuda}, which needs {needed} or later; update the driver, or install builds of "
            "PyTorch and vLLM for an older CUDA"
        )


def count_free_replicas(gpus: int, ranks: int, per_replica: int) -> int:
    """Return how many replicas fit on the GPUs that no rank of the trainer has."""
    return max(gpus - ranks, 0) // per_replica


def gpus_per_replica(config: Config) -> int:
    """Return the number of GPUs of a replica, all on one machine."""
    return config.rollout.vllm.tensor_parallel_size if config.rollout.engine == "vllm" else 1
