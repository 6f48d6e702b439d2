"""laminar scale --rollouts N RUN: change the number of rollout machines of a run on Slurm.

Reads   RUN/slurm/jobs.json, squeue, the config
Writes  RUN/slurm/jobs.json, when it queues one more job array
Gives   0 once Slurm has accepted; machines join and leave later

To add machines, it allows as many tasks of the array to run as were queued, spares included; a
further array of the same script supplies the rest. Trainer nodes stay as many as trainer.nodes. To
remove machines, it first lowers the throttle, so that no spare takes the place, then sends TERM to
the tasks with the highest numbers; their unfinished trajectories continue elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.cluster import slurm
from laminar.cluster.job_scripts import ROLLOUT, scripts_of
from laminar.config import Config, ConfigError
from laminar.config.rules import MACHINES_MAX
from laminar.names import exit_codes
from laminar.run.command_line import shell_command
from laminar.run.directory import run_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("scale")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--rollouts",
        type=int,
        required=True,
        metavar="N",
        help="machines in addition to those with store and trainer, at least 1; trainer.nodes is "
        "fixed",
    )
    parser.set_defaults(function=run_scale)


def run_scale(arguments: argparse.Namespace) -> int:
    """Pass the change to Slurm, and print it."""
    run_dir, wanted = arguments.run, arguments.rollouts
    config = run_config(run_dir)
    jobs = _jobs_of(run_dir)
    if wanted < 1:
        raise ConfigError(
            f"--rollouts {wanted} leaves no rollout machine: give at least 1; "
            f"`{shell_command('stop', run_dir, '--pause')}` takes the run off all machines"
        )
    tasks = [t for t in slurm.list_queued(jobs.rollouts, each=True) if t.state != "COMPLETING"]
    if wanted > len(tasks):
        jobs = _one_more_array(config, run_dir, jobs, wanted - len(tasks))
    left = wanted
    for array in jobs.rollouts:
        own = [task for task in tasks if task.name.startswith(f"{array}_")]
        share = min(left, len(own))
        left -= share
        if own:
            _limit_array(array, own, share)
    return exit_codes.COMPLETE


def _jobs_of(run_dir: Path) -> slurm.Jobs:
    """Return the jobs of a run that is in the queue."""
    jobs = slurm.read_jobs(run_dir)
    if jobs is None:
        raise ConfigError(
            f"{run_dir} was not submitted to Slurm: on machines of your own start a laminar-node, "
            "or end one"
        )
    if not slurm.list_queued([jobs.service]):
        raise ConfigError(
            f"{run_dir} has no service in the queue; "
            f"`{shell_command('submit', '--resume', run_dir)} slurm.rollouts=N` resumes it"
        )
    return jobs


def _one_more_array(config: Config, run_dir: Path, jobs: slurm.Jobs, count: int) -> slurm.Jobs:
    """Queue an array of tasks with unused numbers, all of which may run at once."""
    last = jobs.tasks or config.slurm.rollouts + config.slurm.spares
    if last + count > MACHINES_MAX:
        raise ConfigError(
            f"{count} more machines would be node-{last + 1} to node-{last + count}, and a run has "
            f"at most {MACHINES_MAX} after the first: "
            f"`{shell_command('submit', '--resume', run_dir)} slurm.rollouts=N` renumbers them"
        )
    script = scripts_of(config, run_dir).get_path(ROLLOUT)
    if not script.is_file():
        raise ConfigError(f"there is no {script}: this run was submitted without rollout machines")
    array = slurm.enqueue_script(script, f"--array={last + 1}-{last + count}")
    jobs = msgspec.structs.replace(jobs, rollouts=[*jobs.rollouts, array], tasks=last + count)
    try:
        slurm.write_jobs(run_dir, jobs)
    except BaseException:
        slurm.cancel_jobs([array])
        raise
    print(f"queued {array}_[{last + 1}-{last + count}]")
    return jobs


def _limit_array(array: str, tasks: Sequence[slurm.SlurmTask], share: int) -> None:
    """Limit the number of tasks that run at a time; the last excess ones leave."""
    if not share:
        slurm.cancel_jobs([array])
        print(f"ending {array}")
        return
    slurm.at_a_time(array, share)
    print(f"{share} of {len(tasks)} tasks of {array} may run at a time")
    begun = sorted((task.name for task in tasks if task.state != "PENDING"), key=_parse_number)
    if leaving := begun[share:]:
        slurm.cancel_jobs(leaving)
        print(f"ending {', '.join(leaving)}")


def _parse_number(name: str) -> int:
    return int(name.rpartition("_")[2])
