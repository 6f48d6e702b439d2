"""What the environment of a replica's process is, by engine and machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from laminar.config import Config, ConfigError, load_config
from laminar.engines import environment


def config(engine: str) -> Config:
    return load_config(
        [], ["model.name=m", "data.dataset=spell_backward", f"rollout.engine={engine}"]
    )


def test_vllm_on_gpus_compiles_and_its_core_can_be_forked() -> None:
    found = environment.build_environment(config("vllm"), gpus=True)
    assert found["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "CUDA is not begun before the fork"
    assert "TORCHDYNAMO_DISABLE" not in found
    assert "OMP_NUM_THREADS" not in found


def test_vllm_without_gpus_has_as_many_threads_as_are_set() -> None:
    found = environment.build_environment(config("vllm"), gpus=False)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["TORCHDYNAMO_DISABLE"] == "1"


def test_the_embedded_engine_needs_nothing() -> None:
    assert (
        environment.build_environment(config("torch"), gpus=True)
        == environment.build_environment(config("torch"), gpus=False)
        == {}
    )


@pytest.mark.parametrize("gpus", [True, False])
def test_a_progress_bar_of_vllm_does_not_reach_the_terminal(gpus: bool) -> None:
    bar = "from tqdm import tqdm; list(tqdm([1], desc='Capturing CUDA graphs'))"
    child = subprocess.run(
        [sys.executable, "-c", bar],
        env={**os.environ, **environment.build_environment(config("vllm"), gpus)},
        capture_output=True,
        check=True,
    )
    assert child.stderr == b""


@pytest.mark.parametrize(
    ("given", "devices", "names"),
    [
        (None, ["nvidia3"], ["0"]),  # a container that got GPU 3 only
        (None, ["nvidia5", "nvidia2"], ["0", "1"]),
        (None, [], []),
        ("3, 1", ["nvidia0"], ["3", "1"]),
        ("GPU-5f8c,MIG-1", [], ["GPU-5f8c", "MIG-1"]),
        ("", ["nvidia0"], []),
        ("1,-1,0", ["nvidia0", "nvidia1"], ["1"]),  # CUDA ends the list there
        ("NoDevFiles", ["nvidia0"], []),
    ],
)
def test_gpus_have_the_names_that_cuda_knows(
    given: str | None, devices: list[str], names: list[str]
) -> None:
    assert environment.name_gpus(given, devices) == names


T4 = "0, GPU-9d1c4b0e-5a1d-7b1a-3a0e-1f5f0a6c2b11, Tesla T4, 7.5, 550.54.15\n"
H100 = "1, GPU-2b7c9a5e-0d6f-4f3a-8b1e-7c3d2e1f0a99, NVIDIA H100 80GB HBM3, 9.0, 580.95.05\n"


def test_a_gpu_without_bfloat16_is_refused_by_name() -> None:
    gpus = environment.parse_gpus(H100 + T4)
    with pytest.raises(ConfigError, match=r"GPU 0 of .* a Tesla T4 of compute capability 7.5, and"):
        environment.check_capability(config("torch"), gpus)
    environment.check_capability(config("torch"), environment.parse_gpus(H100))
    words = [f"{section}.dtype=float32" for section in ("trainer", "weights", "rollout")]
    settings = ["model.name=m", "data.dataset=spell_backward"]
    environment.check_capability(load_config([], [*settings, *words]), gpus)
    with pytest.raises(ConfigError, match="to float32"):
        environment.check_capability(load_config([], [*settings, *words[:2]]), gpus)


@pytest.mark.parametrize(
    ("cuda", "driver", "refused"),
    [
        ("13.0", "550.54.15", True),
        ("13.0", "580.95.05", False),
        ("12.8", "550.54.15", False),
        ("12.8", "470.256.02", True),
        (None, "470.256.02", False),
    ],
)
def test_a_driver_that_is_too_old_is_named(cuda: str | None, driver: str, refused: bool) -> None:
    if not refused:
        return environment.check_driver(cuda, driver)
    with pytest.raises(ConfigError, match=rf"driver {driver} .* CUDA {cuda}, which needs \d+ or"):
        environment.check_driver(cuda, driver)
