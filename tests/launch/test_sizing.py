"""Sizes of a new run by its GPUs, whose number and memory are given, as nvidia-smi reports them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli import submit
from laminar.config import Config, dump_config
from laminar.launch import preflight, sizing
from laminar.launch.memory_check import MachineMemory
from tests.launch.test_memory_check import config, large

__all__ = ["large"]
H100, A100, L4 = 81_559 << 20, 40_960 << 20, 23_034 << 20
Load = Callable[[int, int, str], Config]
MATH = "data.max_prompt_length=2048 data.max_response_length=16384"


@pytest.fixture
def load(large: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load settings for Qwen3-8B: 16.4 GB of weights, 147 kB for each token of the cache."""

    def on_machine(gpus: int, size: int, settings: str) -> Config:
        found = MachineMemory(10**12, 10**12, {str(gpu): size for gpu in range(gpus)})
        monkeypatch.setattr(sizing, "this_machine", lambda: found)
        monkeypatch.setattr(preflight, "visible_gpus", lambda: list(found.gpus))
        given = [f"model.name={large}", "data.dataset=spell_backward", *settings.split()]
        return sizing.load_sized_config([], given)

    return on_machine


@pytest.mark.parametrize(
    ("gpus", "settings", "replicas"),
    [
        (8, "", 7),
        (8, "trainer.ranks=4", 4),
        (8, "trainer.ranks=2 rollout.engine=vllm rollout.vllm.tensor_parallel_size=4", 1),
        (2, "", 1),
        (1, "", 2),  # they share the trainer's
        (8, "trainer.ranks=8", 2),
        (0, "", 2),
        (8, "run.nodes=2", 2),  # machines that are emulated on one share its GPUs
        (8, "rollout.device=cpu", 2),
        (8, "rollout.engine=emulated", 2),
        (8, "rollout.replicas=3", 3),
    ],
)
def test_replicas_take_the_gpus_that_the_trainer_leaves(
    load: Load, gpus: int, settings: str, replicas: int
) -> None:
    found = load(gpus, H100, settings)
    assert found.rollout.replicas == replicas and f"replicas = {replicas}\n" in dump_config(found)
    users_number = replicas == 3 or found.run.nodes == 2
    assert bool(preflight.find_idle_gpus(found)) == users_number


@pytest.mark.parametrize(
    ("gpu", "settings", "sequences"),
    [
        (H100, MATH, 82),
        (H100, "", 512),  # the most
        (A100, MATH, 64),  # the least
        (L4, "", 109),
        (L4, f"{MATH} rollout.vllm.tensor_parallel_size=4", 96),
        (0, f"{MATH} rollout.vllm.kv_cache_bytes=80_000_000_000", 117),
        (0, "", 64),
        (H100, "rollout.max_num_seqs=16", 16),
        (H100, "rollout.engine=torch", 64),
    ],
)
def test_sequences_of_vllm_follow_cache_and_longest_row(
    load: Load, gpu: int, settings: str, sequences: int
) -> None:
    found = load(8, gpu, f"rollout.engine=vllm {settings}")
    assert found.rollout.max_num_seqs == sequences


def test_a_cluster_counts_with_gpus_that_it_cannot_ask(large: Path) -> None:
    cluster = [str(Path(__file__).parents[2] / "configs" / "cluster.toml")]
    for more, sequences in (("seed=0", 213), ("slurm.gpus=0", 64), ("rollout.max_num_seqs=9", 9)):
        given = Namespace(config=cluster, overrides=[f"model.name={large}", more], move_old=False)
        assert submit._prepare_new(given)[0].rollout.max_num_seqs == sequences


def test_sequences_stay_within_the_sessions(large: Path, tmp_path: Path) -> None:
    asked = {"rollout__engine": "vllm", "env__path": "e.py", "agents__max_sessions": 200}
    assert sizing.derive_sequences(config(large, **asked), H100)["rollout.max_num_seqs"] == 200
    assert not sizing.derive_sequences(config(tmp_path, **asked), H100)  # the checks refuse it


@pytest.mark.parametrize(("settings", "here", "shard"), [
    ("trainer.ranks=8", (8, H100), "node"),
    ("trainer.ranks=2", (8, H100), "all"),
    ("trainer.ranks=2 trainer.shard=node", (8, H100), "node"),
    ("trainer.ranks=4 slurm.gpus=8", None, "all"),
    ("trainer.ranks=4 slurm.gpus=8 run.planned_gpus=8x80", None, "node"),
    ("trainer.ranks=2", None, "node"),  # on machines of unknown memory
])  # fmt: skip
def test_a_model_is_divided_among_all_nodes_if_one_has_too_little_memory(
    load: Load, settings: str, here: tuple[int, int] | None, shard: str
) -> None:
    """Of submitted runs, the memory of a GPU is planned or assumed to be 40 GiB."""
    given = load(*(here or (0, 0)), f"trainer.nodes=4 trainer.micro_batch_tokens=4096 {settings}")
    assert sizing.decide_shard(given, 1 if here else 0).trainer.shard == shard
