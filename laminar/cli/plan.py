"""laminar plan: what a run takes of memory, and its best layout, on machines that need not exist.

Reads   the config files and overrides; config.json of the model; this machine, without --gpus
Writes  the plan on stdout, nothing else
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from laminar.cli.arguments import CommandParser
from laminar.config import Config, ConfigError, load_config
from laminar.engines.environment import count_free_replicas, gpus_per_replica
from laminar.launch.layouts import SHOWN, Cluster, Layout, layout_lines, list_layouts, settings_of
from laminar.launch.memory_check import (
    MachineMemory,
    MemoryPlace,
    check_estimate,
    format_count,
    memory_lines,
    this_machine,
)
from laminar.launch.planned_machine import describe_machine, parse_gpus, read_planned_sizes
from laminar.launch.sizing import derive_replicas, derive_sequences
from laminar.names import exit_codes


def add_parser(subparsers: Any) -> None:
    text = "show whether a run fits, here or on GPUs that you name, and its best layout"
    parser: CommandParser = subparsers.add_parser("plan", help=text, description=text)
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE")
    add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.take_settings()
    parser.set_defaults(function=run_plan)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe machines."""
    gpus = "GPUs of each machine: number and GB, 8x80, or H100:8"
    parser.add_argument("--gpus", metavar="GPUS", help=gpus)
    parser.add_argument("--nodes", type=int, metavar="N", help="number of machines")
    host = "memory of each machine; default: not limited"
    parser.add_argument("--host-memory", type=float, default=0.0, metavar="GB", help=host)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if the settings as they are do not fit."""
    config, cluster = load_cluster(arguments)
    places, reason = check_config(config, cluster)
    layouts = list_layouts(config, cluster) if cluster.has_layouts(config) else []
    if arguments.json:
        print(json.dumps(_describe_plan(config, places, layouts), indent=2))
    else:
        print("\n".join(format_plan(config, cluster, places, reason, layouts)))
    return exit_codes.FAILED if reason else exit_codes.COMPLETE


def load_cluster(arguments: argparse.Namespace) -> tuple[Config, Cluster]:
    """Return the settings, with defaults that follow from the machines, and the machines."""
    files, given = arguments.config, list(arguments.overrides)
    if arguments.nodes is not None:
        given.append(f"run.nodes={arguments.nodes}")
    config = load_config(files, given)
    if config.is_emulated:
        raise ConfigError('rollout.engine = "emulated" runs no model: there is nothing to plan')
    if arguments.nodes is None and config.slurm.rollouts:
        given.append(f"run.nodes={1 + config.slurm.rollouts}")
        config = load_config(files, given)
    machine = find_machine(arguments, config.run.planned_gpus)
    sizes = read_planned_sizes("model.name", config.model.name)
    critic = None
    if config.has_critic:
        critic = read_planned_sizes("critic.model.name", config.critic_name)
    cluster = Cluster(sizes, machine, config.run.nodes, critic)
    if cluster.has_layouts(config):
        config = load_config(files, given, defaults=_derive_defaults(config, cluster))
    return config, cluster


def find_machine(arguments: argparse.Namespace, planned: str) -> MachineMemory:
    """Return the machine of the options, else of the settings, else this one."""
    host_gb: float = arguments.host_memory
    if not (math.isfinite(host_gb) and host_gb >= 0):
        raise ConfigError(f"--host-memory = {host_gb}: give the GB of a machine, such as 1000")
    if arguments.gpus is not None:
        return describe_machine(parse_gpus(arguments.gpus), host_gb)
    if planned:
        return describe_machine(parse_gpus(planned, "run.planned_gpus"), host_gb)
    here = this_machine()
    return replace(here, memory=int(host_gb * 1e9)) if host_gb else here


def _derive_defaults(config: Config, cluster: Cluster) -> dict[str, Any]:
    size = gpus_per_replica(config)
    found: dict[str, Any] = derive_replicas(config, cluster.gpus)
    if cluster.nodes > 1:
        free = count_free_replicas(cluster.gpus, config.trainer.ranks, size)
        found = {
            "rollout.replicas": max(cluster.gpus // size, 1),
            "rollout.replicas_on_trainer_node": free,
        }
    return found | derive_sequences(config, cluster.gpu_bytes, cluster.model)


def check_config(config: Config, cluster: Cluster) -> tuple[list[list[MemoryPlace]], str]:
    """Return the memory of the settings as they are, and the reason why they do not fit."""
    runs = cluster.list_estimates()
    for key, count in (
        ("trainer.ranks", config.trainer.ranks),
        ("rollout.vllm.tensor_parallel_size", gpus_per_replica(config)),
    ):
        if cluster.has_layouts(config) and count > cluster.gpus:
            return [], f"{key} = {count} is more than the {cluster.gpus} GPUs of a machine"
    reason = ""
    try:
        for run in runs:
            check_estimate(config, run)
    except ConfigError as error:
        reason = str(error)
    return [run.list_places(config) for run in runs], reason


def format_plan(
    config: Config,
    cluster: Cluster,
    places: Sequence[Sequence[MemoryPlace]],
    reason: str,
    layouts: Sequence[Layout],
) -> list[str]:
    """Return all lines: the settings as they are, then the layouts, then the best one's memory."""
    host, size = cluster.machine.memory, cluster.gpu_bytes / 1e9
    rank = config.lora.rank
    trained = f"adapters of rank {rank} are trained" if rank else "all of them are trained"
    memory = f"{host / 1e9:.0f} GB of memory" if host else "memory without limit"
    lines = [
        f"model      {config.model.name}: {format_count(cluster.model.parameters)} parameters, "
        f"{trained}",
        f"machines   {cluster.nodes}, each with {cluster.gpus} GPUs of {size:.1f} GB, {memory}",
        f"fits       {'no: ' + reason if reason else 'yes'}",
        *_format_memory("as configured", places),
    ]
    if cluster.has_layouts(config):
        lines += layout_lines(config, cluster, layouts)
    if layouts and settings_of(layouts[0], config):
        lines += _format_memory("recommended", layouts[0].places)
    return lines


def _format_memory(what: str, places: Sequence[Sequence[MemoryPlace]]) -> list[str]:
    titles = (f"{what}, 10^9 bytes", "each other machine, 10^9 bytes")
    tables = (memory_lines(found, title) for title, found in zip(titles, places, strict=False))
    return [line for table in tables for line in table]


def _describe_plan(
    config: Config, places: Sequence[Sequence[MemoryPlace]], layouts: Sequence[Layout]
) -> dict[str, Any]:
    return {
        "as_configured": _describe_places(places),
        "layouts": [
            {
                "speed": layout.speed,
                "settings": settings_of(layout, config),
                "memory": _describe_places(layout.places),
            }
            for layout in layouts[:SHOWN]
        ],
    }


def _describe_places(places: Sequence[Sequence[MemoryPlace]]) -> list[dict[str, Any]]:
    """Return the memory of the trainer's machine, and of each other one."""
    return [
        {place.name: {"bytes": place.have, "parts": place.parts} for place in machine}
        for machine in places
    ]
