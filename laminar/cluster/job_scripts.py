"""Batch scripts of a run on Slurm: the resources of each job, and the one command that it runs.

Reads   [slurm] of the config
Gives   JobScripts, with readable texts: RUN/slurm/service.sbatch, RUN/slurm/rollout.sbatch
Raises  ConfigError for a run directory that no script can name

One job has the coordinator, the store and the trainer. Each rollout machine is a task of a job
array, so that Slurm replaces one without affecting another: at most slurm.rollouts tasks run at a
time, and slurm.spares more wait for a place. The command is started with `exec`, because Slurm
signals only the process that it started: that process then starts all others and ends last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar.config import Config, ConfigError
from laminar.run.command_line import NAME, own_program
from laminar.run.directory import LOGS_DIR, SLURM_DIR

SERVICE, ROLLOUT = "service", "rollout"
_UNQUOTED = re.compile(r"[\w./,:=@+-]+", re.ASCII)
"""Characters that a line of #SBATCH takes literally; % would be replaced, others end a word."""


@dataclass(frozen=True)
class JobScripts:
    """Scripts of one run."""

    config: Config
    run_dir: Path  #: absolute

    @property
    def service(self) -> str:
        c = self.config
        runs = f"coordinator, store, trainer{_and_replicas(c.replicas_on(0))}"
        return self._build_script(SERVICE, runs, [], "%j", "")

    def build_rollout(self, service_job: str = "") -> str:
        """Return the rollout script; it starts only after `service_job`, if given."""
        slurm = self.config.slurm
        options = [f"--array=1-{slurm.rollouts + slurm.spares}%{slurm.rollouts}"]
        if service_job:
            options.append(f"--dependency=after:{service_job}")
        runs = f"relay{_and_replicas(self.config.rollout.replicas)}"
        return self._build_script(ROLLOUT, runs, options, "%A_%a", ' --node "$SLURM_ARRAY_TASK_ID"')

    def get_path(self, kind: str) -> Path:
        return self.run_dir / SLURM_DIR / f"{kind}.sbatch"

    def _build_script(self, kind: str, runs: str, options: list[str], log: str, node: str) -> str:
        """Build a script; `runs`: description of the job; `node`: arguments selecting its node."""
        slurm = self.config.slurm
        name = re.sub(r"[^\w.+-]", "-", self.config.run.name, flags=re.ASCII)
        output = f"{self.run_dir}/{LOGS_DIR}/{SLURM_DIR}/{kind}-{log}.log"
        options = [
            f"--job-name={name}-{kind}",
            *options,
            *self._list_resources(),
            f"--output={output}",
        ]
        lines = [
            "#!/bin/bash",
            f"# {runs}; written by `{NAME} submit`",
            *(f"#SBATCH {option}" for option in options),
            *([slurm.setup.strip()] if slurm.setup.strip() else []),
            f"exec {self.program} serve {shlex.quote(str(self.run_dir))}{node}",
        ]
        return "\n".join(lines) + "\n"

    def _list_resources(self) -> Iterator[str]:
        """Yield the resources of each machine, and Slurm's handling of the job."""
        slurm = self.config.slurm
        if slurm.partition:
            yield f"--partition={slurm.partition}"
        if slurm.account:
            yield f"--account={slurm.account}"
        if slurm.time:
            yield f"--time={slurm.time}"
        yield "--nodes=1 --ntasks=1"
        if slurm.gpus:
            yield f"--gpus-per-node={slurm.gpus}"
        if slurm.cpus:
            yield f"--cpus-per-task={slurm.cpus}"
        if self.exclusive:
            yield "--exclusive"
        if slurm.mem or self.exclusive:
            yield f"--mem={slurm.mem or 0}"  # 0: all that the machine has
        again = "--no-requeue" if slurm.chain else "--requeue"  # a chain has successors instead
        yield f"{again} --open-mode=append --signal=B:USR1@{slurm.signal_before_s}"
        yield from slurm.extra

    @property
    def exclusive(self) -> bool:
        asked = self.config.slurm.exclusive
        return asked == "yes" or (asked == "auto" and self.config.slurm.gpus > 0)

    @property
    def program(self) -> str:
        """Command that runs Laminar in a job; without preparation, the program that submits it."""
        slurm = self.config.slurm
        own = NAME if slurm.setup.strip() or slurm.launch else own_program()
        return f"{slurm.launch} {own}".strip()


def scripts_of(config: Config, run_dir: Path) -> JobScripts:
    """Return the scripts of a run in this directory; raise ConfigError for an unusable path."""
    absolute = run_dir.absolute()
    if not _UNQUOTED.fullmatch(str(absolute)):
        raise ConfigError(
            f"run directory {absolute} has a character that a batch script cannot name: choose "
            "run.output_dir and run.name of letters, digits and . _ - + = : @ ,"
        )
    return JobScripts(config, absolute)


def _and_replicas(count: int) -> str:
    return f", {count} replica{'' if count == 1 else 's'}" if count else ""
