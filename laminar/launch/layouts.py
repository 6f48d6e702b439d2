"""Layouts of a run on its machines: which fit, and which is the fastest by a rule.

Reads   the settings, with the number of machines; the sizes of the model, a machine's memory
Gives   list_layouts, layout_lines; list_machines, settings_of; list_trainers, trainer_lines

Pure. The bytes are those of memory_check.py. The speed is a rule that orders layouts, not a
measurement (docs/memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from laminar.config import Config, flatten_config, replace_keys
from laminar.engines.environment import count_free_replicas, gpus_per_replica
from laminar.launch import memory_check as check
from laminar.launch.memory_check import GB, MemoryEstimate, MemoryPlace
from laminar.launch.sizing import derive_sequences
from laminar.training.model.footprint import pass_tokens

RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TENSOR_PARALLEL = (1, 2, 4, 8)
NODES = (1, 2, 4, 8)
NODES_SPEED = {"node": 0.9, "all": 0.7}  #: of each GPU of several trainer nodes, by trainer.shard
OFFLOAD_SPEED = 0.6  #: of a trainer whose update is on the CPU
PARALLEL_SPEED = 0.9  #: of each GPU of a replica, once for each doubling of their number
SHARED_SPEED = 0.35  #: of trainer and replicas that take turns on their GPUs
GATHER_TOKENS = 1_024  #: tokens that a pass could compute while it gathers and casts the weights
FULL_BATCH = 16  #: sequences of the greatest length with which a replica decodes at full speed
LEAST_SHARE = 0.2  #: of a GPU for a replica of vLLM, whose own work takes some of it, too
LORA_RANK = 16
COLUMNS = "layouts ranks replicas GPUs/each offload tokens/pass sequences GPU/GB host/GB speed"


class Layout(NamedTuple):
    """Settings that fit."""

    config: Config
    places: list[list[MemoryPlace]]  #: of the trainer's machine, and of each other one
    speed: tuple[float, float]  #: of the slower half, in GPUs; of both, which decides a tie


def list_machines(config: Config, run: MemoryEstimate) -> list[MemoryEstimate]:
    """Return the estimate of the trainer's machine, and of each other one if there are any."""
    return [run, replace(run, first=1)][: config.run.nodes]


def has_layouts(config: Config, run: MemoryEstimate) -> bool:
    """Return whether trainer and replicas are on GPUs of known memory."""
    return _gpu_bytes(run) > 0 and "cpu" not in (config.trainer.device, config.rollout.device)


def list_layouts(config: Config, run: MemoryEstimate) -> list[Layout]:
    """Return the layouts that fit, the fastest first; none without GPUs."""
    if not has_layouts(config, run):
        return []
    splits = (replace_keys(config, split) for split in _list_splits(config, run))
    found = (layout for split in splits if (layout := _fit_split(split, run)))
    return sorted(found, key=lambda layout: layout.speed, reverse=True)


def _list_splits(config: Config, run: MemoryEstimate) -> Iterator[dict[str, Any]]:
    """Yield each split of the GPUs between trainer and replicas."""
    gpus, several = len(run.machine.gpus), config.run.nodes > 1
    parallel = TENSOR_PARALLEL if config.rollout.engine == "vllm" else (1,)
    for ranks, size in product(RANKS, parallel):
        free = count_free_replicas(gpus, ranks, size)
        if max(ranks, size) > gpus or run.model.heads % size:
            continue
        if several or free or ranks == gpus:  # else they would share some of the trainer's GPUs
            yield {
                "trainer.ranks": ranks,
                "rollout.replicas": gpus // size if several else free or gpus // size,
                "rollout.replicas_on_trainer_node": free if several else "auto",
                "rollout.vllm.tensor_parallel_size": size,
            }


def _fit_split(config: Config, run: MemoryEstimate) -> Layout | None:
    """Return the layout of a split: without offload if that fits, then with the largest passes."""
    shares: Sequence[float] = [config.rollout.vllm.gpu_memory_utilization]
    if _shares_gpus(config, run) and not config.rollout.vllm.kv_cache_bytes:
        shares = [share for share in check.SHARES if LEAST_SHARE <= share <= shares[0]]
    for offload, tokens, share in product(("none", "all"), check.list_budgets(config), shares):
        ways = {"trainer.offload": offload, check.TOKENS: tokens, check.VLLM_SHARE: share}
        tried = check.choose_shard(replace_keys(config, ways), run)
        places = [machine.list_places(tried) for machine in list_machines(config, run)]
        fits = (place.fits for machine in places[1:] for place in machine)
        if check.has_room(tried, places[0]) and all(fits) and _count_longest(tried, run) >= 1:
            sized = replace_keys(tried, derive_sequences(tried, _gpu_bytes(run), run.model))
            return Layout(sized, places, _rate_speed(sized, run))
    return None


def _count_longest(config: Config, run: MemoryEstimate) -> float:
    """Return how many sequences of the greatest length the cache of a replica holds."""
    if config.rollout.engine != "vllm":
        return config.rollout.max_num_seqs
    return check.count_cache_tokens(config, run.model, _gpu_bytes(run)) / config.max_model_len


def _gpu_bytes(run: MemoryEstimate) -> int:
    return min(run.machine.gpus.values(), default=0)


def _shares_gpus(config: Config, run: MemoryEstimate) -> bool:
    of_replicas = config.replicas_on(0) * gpus_per_replica(config)
    return config.trainer.ranks + of_replicas > len(run.machine.gpus)


def _rate_speed(config: Config, run: MemoryEstimate) -> tuple[float, float]:
    """Return the speed of the slower half, trainer or replicas, and of both, in GPUs."""
    tokens, size = pass_tokens(config), gpus_per_replica(config)
    trainer = config.trainer.total_ranks * tokens / (tokens + GATHER_TOKENS)
    trainer *= NODES_SPEED[config.trainer.shard] if config.trainer.nodes > 1 else 1
    trainer *= OFFLOAD_SPEED if config.trainer.offload == "all" else 1
    filled = min(1, _count_longest(config, run) / FULL_BATCH)
    replicas = config.total_replicas * size * PARALLEL_SPEED ** math.log2(size) * filled
    part = SHARED_SPEED if _shares_gpus(config, run) else 1
    return part * min(trainer, replicas), part * (trainer + replicas)


def list_changes(config: Config, run: MemoryEstimate) -> list[str]:
    """Return changes, one of each kind, with which some layout fits where none does.

    Further nodes of the trainer have the replicas on another machine."""
    count, own, found = len(run.machine.gpus), _gpu_bytes(run) // GB, []
    host, apart = run.machine.memory // GB, {"run.nodes": max(config.run.nodes, 2)}
    for kind in (
        [(f"lora.rank={LORA_RANK}", count, own, host)] if not config.lora.rank else [],
        [(f"--gpus {count}x{gb}", count, gb, host) for gb in sorted({*check.GPU_GB.values()})],
        [(f"--gpus {more}x{own}", more, own, host) for more in (2, 4, 8) if more > count],
        [(f"--host-memory {gb}", count, own, gb) for gb in (250, 500, 1000, 2000) if gb > host > 0],
    ):
        for words, gpus, gb, memory in kind:
            rank = LORA_RANK if words.startswith("lora") else config.lora.rank
            larger = replace(run, machine=check.parse_machine(f"{gpus}x{gb}", memory))
            if list_layouts(replace_keys(config, {"lora.rank": rank}), larger):
                found.append(words)
                break
    for nodes in (n for n in NODES if n > config.trainer.nodes):
        if list_layouts(replace_keys(config, {"trainer.nodes": nodes, **apart}), run):
            return [*found, f"--nodes {nodes + apart['run.nodes'] - 1} trainer.nodes={nodes}"]
    return found


def list_trainers(
    config: Config, run: MemoryEstimate
) -> Iterator[tuple[Config, list[MemoryPlace]]]:
    """Yield a trainer with all GPUs of as many machines as NODES, and the memory of its first."""
    own = {"trainer.ranks": len(run.machine.gpus), "run.nodes": 2}
    own |= {"rollout.replicas_on_trainer_node": 0}
    for nodes in NODES:
        tried = check.choose_shard(replace_keys(config, own | {"trainer.nodes": nodes}), run)
        yield tried, run.list_places(tried)


def trainer_lines(config: Config, run: MemoryEstimate) -> list[str]:
    """Return the table of list_trainers, if one machine does not suffice or several are asked."""
    if not has_layouts(config, run):
        return []
    found = list(list_trainers(config, run))
    if check.has_room(*found[0]) and config.trainer.nodes == 1:
        return []
    rows = [["trainer/nodes", "ranks", "shard", "GPU/GB", "host/GB", "fits"]]
    for tried, places in found:
        shard = tried.trainer.shard if tried.trainer.nodes > 1 else "-"
        sizes = f"{places[0].want / GB:.1f}", f"{places[-2].want / GB:.0f}"
        cells = f"  {tried.trainer.nodes}", tried.trainer.total_ranks, shard, *sizes
        rows.append([*map(str, cells), "yes" if check.has_room(tried, places) else "no"])
    return check.align_rows(rows)


def _format_ranks(config: Config) -> str:
    nodes, ranks = config.trainer.nodes, config.trainer.ranks
    return f"{nodes}x{ranks}" if nodes > 1 else f"{ranks}"


def settings_of(layout: Layout, config: Config) -> Mapping[str, Any]:
    """Return the settings of a layout that differ from a config."""
    own = flatten_config(config)
    return {key: v for key, v in flatten_config(layout.config).items() if own[key] != v}


def layout_lines(config: Config, run: MemoryEstimate, layouts: Sequence[Layout]) -> list[str]:
    """Return the table of the best layouts, and the settings of the first."""
    if not has_layouts(config, run):
        return []
    if not layouts:
        words = " or ".join(list_changes(config, run))
        hint = f"with {words} one does" if words else "nor does one after a single change"
        return [f"layouts    none fits; {hint}"]
    rows = [COLUMNS.split()]
    for name, (found, places, speed) in zip(("best", "second", "third"), layouts, strict=False):
        host = max(machine[-2].want for machine in places)
        cells = (
            f"  {name}", _format_ranks(found), found.total_replicas, gpus_per_replica(found),
            found.trainer.offload, pass_tokens(found), found.rollout.max_num_seqs,
            f"{places[0][0].want / GB:.1f}", f"{host / GB:.0f}",
            f"{speed[0] / layouts[0].speed[0]:.2f}",
        )  # fmt: skip
        rows.append([str(cell) for cell in cells])
    words = " ".join(f"{key}={v}" for key, v in settings_of(layouts[0], config).items())
    return [
        *check.align_rows(rows),
        f"  best: {words or 'the settings as they are'}",
        "  estimates: 31.8 GB where an H100 took 31.5; speed is a rule (docs/memory.md)",
    ]
