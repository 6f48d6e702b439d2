"""laminar doctor: check that this machine, and its cluster, can run a config.

Reads   the config; the machine: its name, memory, GPUs; the file system of the run directory, the
        model, the data; sbatch's verdict on the jobs
Writes  standard output, a line for each check; a temporary directory next to the run's
Gives   0 if there is no fault, else 1, with a line for each fault that says how to fix it

Without a config it checks the machine only. With [slurm] this machine is a login node: the machines
of the jobs are checked by a short job on two of them (doctor_two_nodes.py).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from laminar.cli.submit import check_accepted, check_shared, load_slurm_config
from laminar.cli.train import take_train_settings
from laminar.cluster.doctor_two_nodes import (
    Check,
    Found,
    check_this_machine,
    check_two_nodes,
    format_results,
    run_check,
)
from laminar.cluster.job_scripts import scripts_of
from laminar.config import Config, ConfigError, load_config, replace_keys
from laminar.engines.check import count_gpus
from laminar.engines.environment import check_driver, list_gpus
from laminar.launch.memory_check import check_memory, choose_shard, estimate_memory, this_machine
from laminar.launch.preflight import check_directory, check_machine, check_model
from laminar.names import exit_codes
from laminar.names.version import __version__
from laminar.net.addresses import AUTO, ip_of, is_loopback, own_name
from laminar.run.command_line import own_program, shell_command
from laminar.run.directory import SECRET_FILE, run_config
from laminar.run.lock import try_lock
from laminar.run.secret import read_secret
from laminar.storage.schema import WRITER_PRAGMAS
from laminar.tasks.data.hub import localize_data, localize_model
from laminar.tasks.data.prompts import load_prompts
from laminar.tasks.import_check import check_import
from laminar.tasks.rewards.reward_functions import reward_spec
from laminar.training.model.footprint import FLOAT32
from laminar.weights.arena.arena import SHARED_MEMORY

SYNC_MAX_S = 0.25
"""Slowest acceptable sync: the coordinator syncs its log before each reply to the replicas."""
SYNCS = 5
RESTART_HINT = "choose another run.output_dir, or mount its file system with them"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor")
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE")
    parser.add_argument("--pair", type=Path, default=None, help=argparse.SUPPRESS)
    take_train_settings(parser)
    parser.set_defaults(function=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run every check, even after a fault."""
    if arguments.pair is not None:
        rank = int(os.environ.get("SLURM_PROCID", "0"))
        for line in format_results(rank, _check_as_task(arguments.pair, rank)):
            print(line, flush=True)
        shared = arguments.pair.is_dir()  # else the other machine need not wait for this one
        return exit_codes.COMPLETE if shared else exit_codes.FAILED
    faults = sum(
        not _print_result(run_check(name, check)) for name, check in _list_checks(arguments)
    )
    faults += sum(not _print_result(found) for found in _of_two(arguments))
    print("no faults found" if not faults else f"{faults} to fix")
    return exit_codes.FAILED if faults else exit_codes.COMPLETE


def _print_result(found: Found) -> bool:
    """Print the result of one check; return False for a fault."""
    print(f"{'ok' if found.sound else 'FAULT':<6} {found.subject:<10} {found.text}", flush=True)
    return found.sound


def _of_two(arguments: argparse.Namespace) -> Iterator[Found]:
    """Yield the findings of two cluster machines, if the run uses several and Slurm is here."""
    try:
        config = load_config(arguments.config, arguments.overrides) if arguments.config else None
        if config is None or not shutil.which("srun"):
            return
        if not (config.slurm.rollouts or config.trainer.nodes > 1):
            return
        config = load_slurm_config(arguments.config, arguments.overrides)
        if not config.is_emulated:
            config = localize_data(localize_model(config))
        scripts = scripts_of(config, config.run_dir)
        check_accepted(scripts)
    except ConfigError:
        return  # reported above already, and such jobs would not start
    try:
        yield from check_two_nodes(config, scripts)
    except ConfigError as error:
        yield Found("machines", False, str(error))


def _check_as_task(directory: Path, rank: int) -> list[Found]:
    """Return the findings of one of the two machines: about both, then about itself."""
    found = check_this_machine(directory, rank)
    if not directory.is_dir():
        return found
    os.environ["HF_HUB_OFFLINE"] = "1"  # as on a machine of a cluster
    config, name = run_config(directory), own_name()
    one = replace_keys(config, {"run.nodes": 1})
    checks: list[tuple[str, Check]] = []
    met = any(each.sound and each.subject.endswith("address") for each in found)
    if config.trainer.nodes > 1 and met:
        checks.append(("ranks", partial(_check_ranks, one, directory, rank)))
    checks.append(("memory", partial(_check_memory, one)))
    if config.slurm.gpus:
        checks.append(("GPUs", partial(_check_machine, one)))
    if not config.is_emulated:
        checks += [
            ("model", partial(_check_model, config, here=True)),
            ("data", partial(_check_data, config)),
        ]
    return [*found, *(run_check(f"{name} {subject}", check) for subject, check in checks)]


def _check_ranks(config: Config, directory: Path, rank: int) -> str:
    """Check that ranks of two machines reach each other; say which shard fits, and its traffic."""
    from laminar.cluster.doctor_ring import measure_ring  # imports torch

    speed, run = measure_ring(directory, rank), estimate_memory(config, 1, this_machine())
    shard, others = choose_shard(config, run).trainer.shard, 1 - 1 / config.trainer.nodes
    times, when = (3, "pass") if shard == "all" else (2, "update")
    moved = times * FLOAT32 * run.model.parameters * others
    return (
        f"{speed / 1e9:.2f} GB/s between two ranks; trainer.shard = {shard!r}, so that each {when} "
        f"sends {moved / 1e9:.1f} GB from a machine: {moved / speed:.1f} s at the speed of one rank"
    )


def _list_checks(arguments: argparse.Namespace) -> Iterator[tuple[str, Check]]:
    yield "program", _check_program
    if not (arguments.config or arguments.overrides):
        yield "directory", partial(_check_directory, Config().run_dir)
        yield from _list_local_checks()
        return
    try:
        config = load_config(arguments.config, arguments.overrides)
        slurm = config.slurm != Config().slurm
        if slurm:
            config = load_slurm_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        yield "settings", partial(_raise_error, error)
        return
    yield "directory", partial(_check_directory, config.run_dir, slurm=slurm)
    yield "secret", partial(_check_secret, config.run_dir)
    if not config.is_emulated:
        yield "model", partial(_check_model, config, here=not slurm)
        yield "data", partial(_check_data, config)
        yield "reward", partial(_check_reward, config)
    if slurm:
        yield "slurm", partial(_check_slurm, config)
    else:
        yield from _list_node_checks(config)


def _raise_error(error: ConfigError) -> str:
    raise error


def _list_local_checks() -> Iterator[tuple[str, Check]]:
    yield "name", _check_hostname
    yield "memory", _check_memory
    yield "GPUs", _check_gpus


def _list_node_checks(config: Config) -> Iterator[tuple[str, Check]]:
    """Yield the checks of each machine of a run."""
    yield "name", partial(_check_hostname, needed=config.coordinator.host == AUTO)
    yield "machine", partial(_check_machine, config)
    yield "memory", partial(_check_memory, config)


def _check_program() -> str:
    return f"laminar {__version__}, Python {platform.python_version()}, {own_program()}"


def _check_directory(run_dir: Path, *, slurm: bool = False) -> str:
    """Check a run's file system: entries, locks, modes, syncs, SQLite's shared memory."""
    check_directory(run_dir)
    if slurm:
        check_shared(run_dir)
    above = next(path for path in run_dir.absolute().parents if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".laminar-doctor-", dir=above) as made:
            _check_locks(Path(made) / "lock")
            _check_modes(Path(made) / "mode")
            _check_database(Path(made) / "store.sqlite")
            sync_s = _sync_s(Path(made) / "log")
    except OSError as error:
        raise ConfigError(
            f"{above} cannot be written ({error.strerror}): make room, or choose another "
            "run.output_dir"
        ) from None
    if sync_s > SYNC_MAX_S:
        raise ConfigError(
            f"a sync in {above} takes {sync_s:.2f} s, and every decision of a run waits for one: "
            "choose a run.output_dir on a faster file system"
        )
    return f"{run_dir}: locks, modes, a sync takes {sync_s * 1e3:.1f} ms"


def _check_locks(path: Path) -> None:
    """Check that only one of two openers of a file can lock it."""
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for _ in range(2))
    try:
        kept = try_lock(first, fcntl.LOCK_EX) and not try_lock(second, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"{path.parents[1]} has no file locks ({error.strerror}): {RESTART_HINT}"
        ) from None
    finally:
        os.close(first)
        os.close(second)
    if not kept:
        raise ConfigError(f"{path.parents[1]} does not keep file locks: {RESTART_HINT}")


def _check_modes(path: Path) -> None:
    """Check that a file can be hidden from other users."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    if mode := path.stat().st_mode & 0o077:
        raise ConfigError(
            f"{path.parents[1]} has no file modes (0600 becomes {0o600 | mode:04o}), so other "
            f"users could read the secret of a run: {RESTART_HINT}"
        )


def _check_database(path: Path) -> None:
    """Check that SQLite can use a write-ahead log."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        modes = [connection.execute(pragma).fetchone() for pragma in WRITER_PRAGMAS]
    except sqlite3.DatabaseError as error:
        modes = [(str(error),)]
    finally:
        connection.close()
    if modes[0] != ("wal",):
        raise ConfigError(
            f"{path.parents[1]} cannot hold a SQLite database with a write-ahead log ({modes[0][0]}"
            "): choose a run.output_dir on a local disk"
        )


def _sync_s(path: Path) -> float:
    """Return the median time of a few syncs, each after appending one page."""
    took = []
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            begun = time.monotonic()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            took.append(time.monotonic() - begun)
    return statistics.median(took)


def _check_secret(run_dir: Path) -> str:
    if not (run_dir / SECRET_FILE).exists():
        return "is created with the run directory"
    read_secret(run_dir)
    return f"{run_dir / SECRET_FILE}: only its owner can read it"


def _check_model(config: Config, *, here: bool) -> str:
    config = localize_model(config)
    check_model(config, here=here)
    return config.model.name


def _check_data(config: Config) -> str:
    data = localize_data(config).data
    prompts = load_prompts(data, with_columns=config.has_sessions)
    return f"{len(prompts.train)} prompts, {len(prompts.held_out)} held out"


def _check_reward(config: Config) -> str:
    own = config.reward.custom_reward_function.path
    check_import(own, "reward.custom_reward_function.path")
    for path in dict.fromkeys(entry.path for entry in config.reward.functions):
        check_import(path, "reward.functions.path")
    functions = reward_spec(config).functions
    return ", ".join(function.label for function in functions)


def _check_hostname(*, needed: bool = False) -> str:
    """Check that other machines can reach this one by the address of its name."""
    ip = ip_of(AUTO, "coordinator.host")
    if not is_loopback(f"tcp://{ip}:0"):
        return f"{platform.node()} is {ip}"
    if needed:
        raise ConfigError(
            f"{platform.node()} is {ip}, which other machines cannot reach: set coordinator.host "
            "to an interface or address of its network, or correct its name in /etc/hosts"
        )
    return f"{platform.node()} is {ip}: for several machines give coordinator.host an interface"


def _check_machine(config: Config) -> str:
    """Check ports, open files and GPUs."""
    check_machine(config)
    gpus = 0 if config.is_emulated else count_gpus()
    if config.slurm.gpus > gpus:
        raise ConfigError(
            f"PyTorch finds {gpus} of slurm.gpus = {config.slurm.gpus} GPUs on {platform.node()}: "
            "ask for as many as a machine has, or install a PyTorch for its driver"
        )
    text = "" if config.is_emulated else f": {_check_gpus()}"
    return f"ports, open files, {gpus} GPUs{text}"


def _check_gpus() -> str:
    """Check that the driver fits PyTorch, which otherwise finds no GPU."""
    import torch  # takes longer to load than all the rest

    found = list_gpus()
    if not found:
        return f"{count_gpus()} that PyTorch can use"
    check_driver(torch.version.cuda, found[0].driver)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU only"
    return (
        f"{count_gpus()} of {len(found)} that PyTorch can use, driver {found[0].driver}, PyTorch "
        f"for {built}"
    )


def _check_memory(config: Config | None = None) -> str:
    """Check that the weights fit into the job's memory, and into shared memory now."""
    if config is not None and not config.is_emulated:
        try:
            config = localize_model(config)
            check_model(config, here=False)
        except ConfigError:
            return "unknown without the model"
    if config is not None and (places := check_memory(config, config.run.nodes)):
        free = shutil.disk_usage(SHARED_MEMORY).free
        slots = next(place for place in places if place.name == str(SHARED_MEMORY))
        if slots.want > free:
            raise ConfigError(
                f"{SHARED_MEMORY} has {free / 1e9:.1f} GB free, and the weight slots take "
                f"{slots.want / 1e9:.1f} GB: `{shell_command('clean')}` frees the memory of killed "
                "runs, weights.slots = 3 takes less"
            )
        return "; ".join(map(str, places))
    machine = this_machine()
    return (
        f"{machine.memory / 1e9:.1f} GB available to this job, {machine.shared / 1e9:.1f} GB of "
        f"{SHARED_MEMORY}"
    )


def _check_slurm(config: Config) -> str:
    """Check that Slurm would accept the jobs: partition, account, resources."""
    check_accepted(scripts := scripts_of(config, config.run_dir))
    asked = config.slurm.partition or "the default partition"
    return f"{asked} accepts the jobs: {', '.join(['service', *scripts.arrays])}"
