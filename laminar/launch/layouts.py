"""Layouts of a run on given machines: which fit, and which is the fastest by a rule.

Reads   the settings, the sizes of the model, the memory of the machines
Gives   Cluster, Layout; list_layouts, list_changes, layout_lines, settings_of

Pure. The bytes are those of memory_check.py. Speed is a rule and not a measurement (see
docs/memory.md): it only orders layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from laminar.config import Config, flatten_config, replace_keys
from laminar.engines.environment import count_free_replicas, gpus_per_replica
from laminar.launch.memory_check import (
    GPU,
    SHARES,
    TOKENS,
    VLLM_SHARE,
    MachineMemory,
    MemoryEstimate,
    MemoryPlace,
    align_rows,
    count_cache_tokens,
    list_budgets,
)
from laminar.launch.planned_machine import GB, GPU_GB
from laminar.launch.sizing import derive_sequences
from laminar.training.model.footprint import ModelSizes, pass_tokens

RESERVE = 4 * GB  #: of each GPU of the trainer, for CUDA, collectives and fragmentation
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TENSOR_PARALLEL = (1, 2, 4, 8)
OFFLOAD_SPEED = 0.6  #: of a trainer that computes its update on the CPU
PARALLEL_SPEED = 0.9  #: of a replica's GPU, each time that their number doubles
GATHER_TOKENS = 1_024  #: tokens that a pass could compute while it gathers and casts the weights
SHARED_SPEED = 0.4  #: of trainer and replicas that take turns on their GPUs
FULL_BATCH = 64  #: sequences with which a replica decodes at full speed
SHOWN = 3  #: layouts
LORA_RANK = 16


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike, and the models of a run."""

    model: ModelSizes
    machine: MachineMemory
    nodes: int = 1
    critic: ModelSizes | None = None

    @property
    def gpus(self) -> int:
        return len(self.machine.gpus)

    @property
    def gpu_bytes(self) -> int:
        return min(self.machine.gpus.values(), default=0)

    def list_estimates(self) -> list[MemoryEstimate]:
        """Return the estimate of the trainer's machine, and of each other one if there are any."""
        first = MemoryEstimate(self.model, 1, self.machine, self.critic)
        return [first, replace(first, first=1)][: self.nodes]

    def has_layouts(self, config: Config) -> bool:
        return bool(self.gpus) and "cpu" not in (config.trainer.device, config.rollout.device)

    def resize(self, gpus: int, size: int) -> Cluster:
        machine = replace(self.machine, gpus={str(index): size for index in range(gpus)})
        return replace(self, machine=machine)


@dataclass(frozen=True)
class Layout:
    """Settings that fit, with their places in memory and their speed by the rule."""

    config: Config
    places: list[list[MemoryPlace]]  #: of the trainer's machine, and of each other one
    speed: float
    balance: float  #: sum of both halves' speeds, which decides between equals

    @property
    def gpu(self) -> MemoryPlace:
        """The GPU of the trainer."""
        return self.places[0][0]

    @property
    def host_bytes(self) -> int:
        return max(place.want for places in self.places for place in places[-2:])


def list_layouts(config: Config, cluster: Cluster) -> list[Layout]:
    """Return the layouts that fit, the fastest first."""
    found = [
        layout
        for wanted in _list_splits(config, cluster)
        if (layout := _fit_layout(replace_keys(config, wanted), cluster))
    ]
    return sorted(found, key=lambda layout: (-layout.speed, -layout.balance))


def _list_splits(config: Config, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield each split of the GPUs between trainer and replicas, and each way of the replicas."""
    vllm = config.rollout.engine == "vllm"
    heads, gpus = cluster.model.heads, cluster.gpus
    sizes = [n for n in TENSOR_PARALLEL if n <= gpus and (n == 1 or (vllm and heads % n == 0))]
    for ranks, size in product((n for n in RANKS if n <= gpus), sizes):
        free = count_free_replicas(gpus, ranks, size)
        if cluster.nodes == 1 and not free and ranks < gpus:
            continue  # replicas would share some GPUs of the trainer, and leave others idle
        yield {
            "trainer.ranks": ranks,
            "rollout.vllm.tensor_parallel_size": size,
            "rollout.replicas": gpus // size if cluster.nodes > 1 else free or gpus // size,
            "rollout.replicas_on_trainer_node": free if cluster.nodes > 1 else "auto",
            "run.nodes": cluster.nodes,
        }


def _fit_layout(config: Config, cluster: Cluster) -> Layout | None:
    """Return the fastest layout of a split: without offload, then with the largest passes."""
    shares: Sequence[float] = [config.rollout.vllm.gpu_memory_utilization]
    if _shares_gpus(config, cluster) and not config.rollout.vllm.kv_cache_bytes:
        shares = [share for share in SHARES if share <= shares[0]]
    for offload, tokens, share in product(("none", "all"), list_budgets(config), shares):
        tried = replace_keys(
            config, {"trainer.offload": offload, TOKENS: tokens, VLLM_SHARE: share}
        )
        places = [run.list_places(tried) for run in cluster.list_estimates()]
        if _has_room(tried, cluster, places):
            sized = derive_sequences(tried, cluster.gpu_bytes, cluster.model)
            tried = replace_keys(tried, sized)
            return Layout(tried, places, *_rate_speed(tried, cluster))
    return None


def _has_room(config: Config, cluster: Cluster, places: list[list[MemoryPlace]]) -> bool:
    trainers = places[0][: config.trainer.ranks]
    if any(place.want + RESERVE > place.have for place in trainers):
        return False
    if not all(place.fits for machine in places for place in machine):
        return False
    return _count_sequences(config, cluster) >= 4  # one of the longest


def _count_sequences(config: Config, cluster: Cluster) -> int:
    """Return how many sequences a replica's cache holds; the rule of sizing.choose_sequences."""
    if config.rollout.engine != "vllm":
        return config.rollout.max_num_seqs
    tokens = count_cache_tokens(config, cluster.model, cluster.gpu_bytes)
    return tokens * 4 // config.max_model_len


def _shares_gpus(config: Config, cluster: Cluster) -> bool:
    size = gpus_per_replica(config)
    free = count_free_replicas(cluster.gpus, config.trainer.ranks, size)
    return bool(config.replicas_on(0)) and not free


def _rate_speed(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Return the speed of the slower half in GPUs, and the sum of both halves."""
    tokens, size = pass_tokens(config), gpus_per_replica(config)
    trainer = config.trainer.ranks * tokens / (tokens + GATHER_TOKENS)
    trainer *= OFFLOAD_SPEED if config.trainer.offload == "all" else 1
    batch = min(1, _count_sequences(config, cluster) / FULL_BATCH)
    replicas = config.total_replicas * size * PARALLEL_SPEED ** math.log2(size) * batch
    part = SHARED_SPEED if _shares_gpus(config, cluster) else 1
    return part * min(trainer, replicas), part * (trainer + replicas)


def list_changes(config: Config, cluster: Cluster) -> list[str]:
    """Return changes with each of which some layout fits, where none does."""
    found = []
    if not config.lora.rank and list_layouts(
        replace_keys(config, {"lora.rank": LORA_RANK}), cluster
    ):
        found.append(f"lora.rank={LORA_RANK}")
    own = cluster.gpu_bytes // GB
    larger = sorted(gb for gb in {*GPU_GB.values()} if gb > own)
    more = [n * cluster.gpus for n in (2, 4, 8) if n * cluster.gpus <= 8]
    for tries in ([(cluster.gpus, gb) for gb in larger], [(count, own) for count in more]):
        for count, gb in tries:
            if list_layouts(config, cluster.resize(count, gb * GB)):
                found.append(f"--gpus {count}x{gb}")
                break
    unlimited = replace(cluster, machine=replace(cluster.machine, memory=0, shared=0))
    if cluster.machine.memory and (fitting := list_layouts(config, unlimited)):
        least = min(layout.host_bytes for layout in fitting)
        found.append(f"--host-memory {-(-least // GB)}")
    return found


def settings_of(layout: Layout, config: Config) -> Mapping[str, Any]:
    """Return the settings of a layout that differ from a config."""
    own = flatten_config(config)
    return {key: v for key, v in flatten_config(layout.config).items() if own.get(key) != v}


def layout_lines(config: Config, cluster: Cluster, layouts: Sequence[Layout]) -> list[str]:
    """Return the table of the best layouts, and the settings of the first."""
    if not layouts:
        changes = list_changes(config, cluster)
        hint = " or ".join(changes) if changes else "a smaller model, or shorter rows"
        return [f"layouts    none fits; what would: {hint}"]
    titles = ["layouts, best first", "trainer", "replicas", "offload", "pass tokens"]
    rows = [[*titles, "sequences", f"{GPU}GB", "host GB", "speed"]]
    best = layouts[0].speed
    rows += [
        [name, *_format_layout(layout), f"{layout.speed / best:.2f}"]
        for name, layout in zip(("  recommended", "  second", "  third"), layouts, strict=False)
    ]
    words = " ".join(f"{key}={value}" for key, value in settings_of(layouts[0], config).items())
    return [
        *align_rows(rows),
        f"  recommended: {words or 'the settings as they are'}",
        "  bytes are estimates; speed is a rule, relative to the first (docs/memory.md)",
    ]


def _format_layout(layout: Layout) -> list[str]:
    config = layout.config
    size = gpus_per_replica(config)
    each = f" of {size} GPUs" if size > 1 else ""
    return [
        f"{config.trainer.ranks} GPU{'s' if config.trainer.ranks > 1 else ''}",
        f"{config.total_replicas}{each}",
        config.trainer.offload,
        f"{pass_tokens(config)}",
        f"{config.rollout.max_num_seqs}",
        f"{layout.gpu.want / GB:.1f}",
        f"{layout.host_bytes / GB:.0f}",
    ]
