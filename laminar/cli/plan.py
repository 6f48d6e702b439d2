"""laminar plan: show whether a run fits, on this machine or on others, and its best layouts.

Reads   the config files and overrides; config.json of the model; this machine, without --gpus
Writes  the plan on stdout
"""

from __future__ import annotations

import argparse
from typing import Any

from laminar.cli.submit import load_slurm_config
from laminar.config import Config, ConfigError, load_config
from laminar.engines.environment import gpus_per_replica
from laminar.launch import memory_check as check
from laminar.launch.layouts import (
    has_layouts,
    layout_lines,
    list_layouts,
    list_machines,
    settings_of,
    trainer_lines,
)
from laminar.launch.memory_check import MemoryEstimate, MemoryPlace
from laminar.launch.sizing import derive_replicas, derive_sequences
from laminar.names import exit_codes


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan")
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE")
    add_machine(parser)
    parser.take_settings()
    parser.set_defaults(function=run_plan)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe machines."""
    text = "of each machine: number and GB, such as 8x80, or H100:8"
    parser.add_argument("--gpus", default="", help=text)
    parser.add_argument("--nodes", type=int, metavar="N", help="number of machines")
    text = "memory of each machine; default: not limited"
    parser.add_argument("--host-memory", type=float, default=0.0, metavar="GB", help=text)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if the settings as they are do not fit."""
    asked, run = load_plan(arguments, arguments.config, arguments.overrides)
    layouts, config = list_layouts(asked, run), check.choose_shard(asked, run)
    reason, machines = _find_excess(config, run), list_machines(config, run)
    lines = [
        f"model      {config.model.name}, {check.format_count(run.model.parameters)} parameters",
        f"machines   {len(config.node_names)} with {len(run.machine.gpus)} GPUs each",
        f"fits       {f'no: {reason}' if reason else 'yes'}",
        *_format_memory("as configured", [here.list_places(config) for here in machines]),
        *trainer_lines(asked, run),
        *layout_lines(config, run, layouts),
    ]
    if layouts and settings_of(layouts[0], config):
        lines += _format_memory("best", layouts[0].places)
    print("\n".join(lines))
    return exit_codes.FAILED if reason else exit_codes.COMPLETE


def load_plan(
    arguments: argparse.Namespace, files: list[str], overrides: list[str]
) -> tuple[Config, MemoryEstimate]:
    """Return the settings, with defaults derived from the machines, and the estimate.

    Neither the data nor the user's functions need to be there.
    """
    config, given = load_config(files, overrides, files_exist=False), [*overrides]
    if arguments.nodes is not None:
        if 0 < arguments.nodes < config.trainer.nodes:
            raise ConfigError(
                f"--nodes = {arguments.nodes} is less than trainer.nodes = {config.trainer.nodes}: "
                "raise one or lower the other"
            )
        given.append(f"run.nodes={arguments.nodes - config.trainer.nodes + 1}")
        config = load_config(files, given, files_exist=False)
    if config.is_emulated:
        raise ConfigError('rollout.engine = "emulated" runs no model: there is nothing to plan')
    gpus, nodes = arguments.gpus or config.run.planned_gpus, config.run.nodes
    if not 0 <= (host := arguments.host_memory) < (1e6 if gpus else 1e-9):
        raise ConfigError(f"--host-memory = {host:g}: give the GB of a machine, with --gpus")
    key = "--gpus" if arguments.gpus else "run.planned_gpus"
    machine = check.parse_machine(gpus, host, key) if gpus else check.this_machine()
    sizes, critic = check.read_planned_sizes("model.name", config.model.name), None
    if config.has_critic:
        critic = check.read_planned_sizes("critic.model.name", config.critic_name)
    run = MemoryEstimate(sizes, 1, machine, critic)
    if has_layouts(config, run):
        defaults = derive_sequences(config, min(machine.gpus.values()), sizes)
        if others := nodes - 1 or (config.slurm.rollouts if arguments.nodes is None else 0):
            given += [f"slurm.gpus={len(machine.gpus)}", f"slurm.rollouts={others}"]
            config = load_slurm_config(files, given, defaults, files_exist=False)
        else:
            defaults |= derive_replicas(config, len(machine.gpus))
            config = load_config(files, given, defaults=defaults, files_exist=False)
    return config, run


def _find_excess(config: Config, run: MemoryEstimate) -> str:
    """Return the reason why the settings as they are do not fit; empty if they do."""
    gpus = len(run.machine.gpus)
    if 0 < gpus < (size := max(config.trainer.ranks, gpus_per_replica(config))):
        return f"trainer or replica needs {size} GPUs of one machine, which has {gpus}"
    try:
        for machine in list_machines(config, run):
            check.check_estimate(config, machine)
    except ConfigError as error:
        return str(error)
    return ""


def _format_memory(what: str, places: list[list[MemoryPlace]]) -> list[str]:
    lines = check.memory_lines(places[0], f"{what}, 10^9 bytes")
    others = (f"  each other machine: {gpu}; {host}" for gpu, *_, host, _ in places[1:])
    return [*lines, *others]
