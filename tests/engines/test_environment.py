"""What the environment of a replica's process is, by engine and machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from laminar.config import Config, load_config
from laminar.engines.environment import build_environment


def config(engine: str) -> Config:
    return load_config(
        [], ["model.name=m", "data.dataset=spell_backward", f"rollout.engine={engine}"]
    )


def test_vllm_on_gpus_compiles_and_its_core_can_be_forked() -> None:
    found = build_environment(config("vllm"), gpus=True)
    assert found["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "CUDA is not begun before the fork"
    assert "TORCHDYNAMO_DISABLE" not in found
    assert "OMP_NUM_THREADS" not in found


def test_vllm_without_gpus_has_as_many_threads_as_are_set() -> None:
    found = build_environment(config("vllm"), gpus=False)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["TORCHDYNAMO_DISABLE"] == "1"


def test_the_embedded_engine_needs_nothing() -> None:
    assert (
        build_environment(config("torch"), gpus=True)
        == build_environment(config("torch"), gpus=False)
        == {}
    )


@pytest.mark.parametrize("gpus", [True, False])
def test_a_progress_bar_of_vllm_does_not_reach_the_terminal(gpus: bool) -> None:
    bar = "from tqdm import tqdm; list(tqdm([1], desc='Capturing CUDA graphs'))"
    child = subprocess.run(
        [sys.executable, "-c", bar],
        env={**os.environ, **build_environment(config("vllm"), gpus)},
        capture_output=True,
        check=True,
    )
    assert child.stderr == b""
