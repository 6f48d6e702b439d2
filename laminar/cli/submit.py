"""laminar submit: start or resume a run on a Slurm cluster.

Reads   the config files and overrides of the command line; Slurm's verdict on the jobs
Writes  the run directory with RUN/slurm, as laminar train writes its own; the plan
Starts  a job and up to two job arrays, which run `laminar serve`; with --print nothing

The command runs on a login node, which is not a machine of the run, so its resources are not
checked. Either all jobs are queued, or none is, and a new run's directory is removed again.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from laminar.cli.train import add_move_old, add_sources, take_train_settings
from laminar.cluster.job_scripts import ROLLOUT, SERVICE, TRAINER, JobScripts, scripts_of
from laminar.cluster.slurm import (
    Jobs,
    SlurmRefused,
    cancel_jobs,
    check_script,
    enqueue_script,
    list_queued,
    read_jobs,
    write_jobs,
)
from laminar.config import Config, ConfigError, load_config
from laminar.config.rules import slurm_seconds
from laminar.engines.environment import count_free_replicas, gpus_per_replica
from laminar.launch.preflight import check_settings
from laminar.launch.resume_check import claim_run_directory, resumed_config
from laminar.launch.sizing import ASSUMED_GPU_BYTES, derive_sequences
from laminar.launch.terminal import Terminal
from laminar.launch.train import move_aside, place_of, plan_run, prepare_directory
from laminar.names import exit_codes
from laminar.net.addresses import AUTO
from laminar.run.command_line import shell_command
from laminar.run.directory import CONFIG_FILE, LOGS_DIR, SLURM_DIR, run_config
from laminar.run.renames import write_whole

QUEUE_S = 86_400.0  #: longest wait for machines that a run needs to begin, and may still be queued
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")  #: file systems that other machines cannot see


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("submit")
    add_sources(parser)
    text = "show the plan and the batch scripts, submit nothing"
    parser.add_argument("--print", action="store_true", help=text)
    add_move_old(parser)
    take_train_settings(parser)
    parser.set_defaults(function=run_submit)


def run_submit(arguments: argparse.Namespace) -> int:
    """Check the run, show the plan, and queue the jobs."""
    console = Terminal()
    config, run_dir = _prepare_resume(arguments) if arguments.resume else _prepare_new(arguments)
    check_shared(run_dir)
    config = check_settings(config, here=False)
    plan, found = plan_run(config, run_dir, arguments, None, console, machines=0)
    scripts = scripts_of(plan.config, run_dir)
    console.print_lines([*_job_lines(scripts), *(f"WARNING: {text}" for text in found.values())])
    if arguments.print:
        console.print_lines(_format_scripts(scripts))
        return exit_codes.COMPLETE
    check_accepted(scripts)
    if not arguments.resume and run_dir.exists():
        console.print_lines([f"moved the old run to {move_aside(run_dir)}"])
    place = claim_run_directory if arguments.resume else prepare_directory
    place(plan.config, run_dir, found).close()  # the service joins a run without other holders
    try:
        jobs = _enqueue_jobs(scripts)
    except BaseException:
        if not arguments.resume:
            shutil.rmtree(run_dir)
        raise
    console.print_lines(_queued_lines(scripts, jobs))
    return exit_codes.COMPLETE


def _prepare_new(arguments: argparse.Namespace) -> tuple[Config, Path]:
    given = arguments.config, arguments.overrides
    config = load_slurm_config(*given)
    if config.slurm.gpus:
        config = load_slurm_config(*given, derive_sequences(config, ASSUMED_GPU_BYTES))
    return config, place_of(config, arguments.move_old)


def load_slurm_config(
    files: list[str],
    overrides: list[str],
    defaults: Mapping[str, Any] | None = None,
    *,
    files_exist: bool = True,
) -> Config:
    """Load the settings of a new run, with defaults derived from the requested machines.

    The user's settings take precedence.
    """
    load = partial(load_config, files_exist=files_exist)
    config = load(files, overrides)
    given = [*overrides, f"run.nodes={1 + config.slurm.rollouts}"]
    defaults = {"coordinator.host": AUTO, **(defaults or {})}
    for follow in (_derive_replicas, _derive_shared_replicas, _derive_start_timeout):
        defaults |= follow(config)
        config = load(files, given, defaults=defaults)
    return config


def _derive_replicas(config: Config) -> dict[str, Any]:
    """Return as many replicas as the GPUs of a machine allow."""
    gpus, size = config.slurm.gpus, gpus_per_replica(config)
    if 0 < gpus < size:
        raise ConfigError(
            f"slurm.gpus = {gpus} is less than rollout.vllm.tensor_parallel_size = {size}, and all "
            "GPUs of a replica are on one machine: raise one or lower the other"
        )
    return {"rollout.replicas": gpus // size} if gpus else {}


def _derive_shared_replicas(config: Config) -> dict[str, Any]:
    """Return the replicas that fit next to the trainer, which shares its GPUs with none."""
    gpus, size = config.slurm.gpus, gpus_per_replica(config)
    if not gpus:
        return {}
    free = count_free_replicas(gpus, config.trainer.ranks, size)
    count = config.rollout.replicas * free // (gpus // size)
    return {"rollout.replicas_on_trainer_node": count}


def _derive_start_timeout(config: Config) -> dict[str, Any]:
    """Extend the start timeout if the run waits for machines that may still be queued."""
    waits = config.trainer.nodes > 1 or not config.replicas_on(0)
    return {"coordinator.start_timeout_s": QUEUE_S} if waits else {}


def _prepare_resume(arguments: argparse.Namespace) -> tuple[Config, Path]:
    """Return the settings and directory of a run to resume."""
    if arguments.move_old:
        raise ConfigError("--resume continues a run, and --move-old moves it aside: give one")
    if arguments.config:
        raise ConfigError("--resume uses the run's settings: give changes as key=value, without -c")
    run_dir: Path = arguments.resume
    run_config(run_dir)
    jobs = read_jobs(run_dir)
    if jobs is not None and (living := list_queued(jobs.ids)):
        names = ", ".join(f"{task.name} ({task.state.lower()})" for task in living)
        raise ConfigError(
            f"{run_dir} already has jobs in the queue: {names}; to submit it again, end them "
            f"first: scancel {' '.join(jobs.ids)}"
        )
    asked = load_config([], arguments.overrides, resolved=run_dir / CONFIG_FILE).slurm
    machines = f"run.nodes={1 + asked.rollouts}"
    return resumed_config(run_dir, [], [*arguments.overrides, machines]), run_dir


def check_shared(run_dir: Path) -> None:
    """Raise ConfigError if other machines cannot see the run directory, as far as known here."""
    place, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if run_dir.absolute().is_relative_to(mount) and len(mount) >= len(place):
            place, kind = mount, found
    if kind in MEMORY_FILE_SYSTEMS:
        raise ConfigError(
            f"run directory {run_dir} is in {place}, in the memory of this machine ({kind}), where "
            "other machines cannot see it: choose a run.output_dir on a file system that they "
            "share"
        )


def check_accepted(scripts: JobScripts) -> None:
    """Raise ConfigError for the first job that Slurm would refuse; none is queued."""
    texts = {SERVICE: scripts.service} | {k: scripts.build_array(k) for k in scripts.arrays}
    for kind, text in texts.items():
        with _explain_refusal(scripts, kind):
            check_script(text)


def _enqueue_jobs(scripts: JobScripts) -> Jobs:
    """Write the scripts and queue all of them or none."""
    (scripts.run_dir / LOGS_DIR / SLURM_DIR).mkdir(parents=True, exist_ok=True)
    scripts.get_path(SERVICE).parent.mkdir(exist_ok=True)
    jobs = Jobs(service=_enqueue_one(scripts, SERVICE, scripts.service))
    try:
        for kind in scripts.arrays:
            text = scripts.build_array(kind, jobs.service)
            array = {f"{kind}s": [_enqueue_one(scripts, kind, text)]}
            jobs = msgspec.structs.replace(jobs, **array)
        write_jobs(scripts.run_dir, jobs)
    except BaseException:
        cancel_jobs(jobs.ids)
        raise
    return jobs


def _enqueue_one(scripts: JobScripts, kind: str, text: str) -> str:
    path = scripts.get_path(kind)
    write_whole(path, text.encode(), durable=True)
    with _explain_refusal(scripts, kind):
        return enqueue_script(path)


@contextlib.contextmanager
def _explain_refusal(scripts: JobScripts, kind: str) -> Iterator[None]:
    """Add the requested resources to Slurm's refusal of a job, so that they can be corrected."""
    try:
        yield
    except SlurmRefused as error:
        slurm = scripts.config.slurm
        of_kind = {ROLLOUT: ("rollouts", "spares"), TRAINER: ("trainer_spares",)}
        tasks = of_kind.get(kind, ())
        keys = ("partition", "account", "time", "gpus", "cpus", "mem", "extra", *tasks)
        asked = {key: value for key in keys if (value := getattr(slurm, key))}
        said = ", ".join(f"slurm.{key} = {value!r}" for key, value in asked.items())
        raise ConfigError(
            f"{error}; the {kind} job asks for {said or 'one machine'}: correct what is refused"
        ) from None


def _job_lines(scripts: JobScripts) -> list[str]:
    """Return the lines of the plan about the jobs."""
    c, slurm = scripts.config, scripts.config.slurm
    gpus = f", {_format_count(slurm.gpus, 'GPU')}" if slurm.gpus else ""
    replicas = f", {_format_count(c.replicas_on(0), 'replica')}" if c.replicas_on(0) else ""
    lines = [f"service    1 machine{gpus}: coordinator, store, trainer{replicas}"]
    each = {TRAINER: (c.trainer.ranks, "rank"), ROLLOUT: (c.rollout.replicas, "replica")}
    for kind, array in scripts.arrays.items():
        all_, own = array.machines + array.spares, _format_count(*each[kind])
        what = f"{array.machines} of {all_} machines at a time" if array.spares else ""
        what = what or _format_count(array.machines, "machine")
        lines.append(f"{kind:10} {what}{gpus}: {own} each, once the service has started")
    machines = 1 + sum(array.machines for array in scripts.arrays.values())
    if slurm.gpus:
        hours = (slurm_seconds(slurm.time) or 0) / 3600 if slurm.time else 0
        until = f", {machines * slurm.gpus * hours:,.0f} GPU-hours" if hours else ""
        lines.append(f"asks for   {_format_count(machines * slurm.gpus, 'GPU')} at a time{until}")
    limit = slurm.time or "as the partition has it"
    before = f"{slurm.signal_before_s} s before its end the run pauses"
    how = "in the next job of the chain" if slurm.chain else "when Slurm restarts it"
    on = f", and resumes {how}" if slurm.max_requeues else ""
    lines.append(f"time       {limit}; {before}{on}")
    return lines


def _format_scripts(scripts: JobScripts) -> Iterator[str]:
    """Yield the scripts as they would be written."""
    yield from ["", f"# {scripts.get_path(SERVICE)}", scripts.service]
    for kind in scripts.arrays:
        yield from [f"# {scripts.get_path(kind)}", scripts.build_array(kind, "SERVICE")]


def _queued_lines(scripts: JobScripts, jobs: Jobs) -> list[str]:
    """Return lines about the queued jobs, and the commands to follow or stop the run."""
    run_dir, arrays = scripts.run_dir, scripts.arrays.items()
    queued = [f"{k} {job}_[{a.tasks}]" for job, (k, a) in zip(jobs.arrays, arrays, strict=True)]
    return [
        f"queued     {', '.join([f'service {jobs.service}', *queued])}",
        f"scripts    {run_dir / SLURM_DIR}/*.sbatch; what they print: "
        f"{run_dir / LOGS_DIR / SLURM_DIR}",
        f"look at    {shell_command('ps', run_dir)}; {shell_command('tail', '-f', run_dir)}",
        f"end it     {shell_command('stop', run_dir)}",
    ]


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
