"""Batch scripts of a run on Slurm: the resources of each job, and the one command that it runs.

Reads   [slurm] of the config
Gives   JobScripts, with readable texts: RUN/slurm/service.sbatch, trainer.sbatch, rollout.sbatch
Raises  ConfigError for a run directory that no script can name

One job has the coordinator, the store and the first node of the trainer. Each further trainer node,
and each rollout machine, is a task of a job array, so that Slurm replaces one without affecting
another: as many as the run needs at a time, while spares wait for a place. The command is started
with `exec`, because Slurm signals only the process that it started: that process then starts all
others and ends last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from laminar.config import Config, ConfigError
from laminar.run.command_line import NAME, own_program
from laminar.run.directory import LOGS_DIR, SLURM_DIR

SERVICE, TRAINER, ROLLOUT = "service", "trainer", "rollout"
_UNQUOTED = re.compile(r"[\w./,:=@+-]+", re.ASCII)
"""Characters that a line of #SBATCH takes literally; % would be replaced, others end a word."""


class JobArray(NamedTuple):
    """Machines of one kind, a task each."""

    machines: int  #: that run at a time
    spares: int
    runs: str  #: on each machine
    option: str  #: of `laminar serve`, before the number of a machine

    @property
    def tasks(self) -> str:
        return f"1-{self.machines + self.spares}%{self.machines}"


@dataclass(frozen=True)
class JobScripts:
    """Scripts of one run."""

    config: Config
    run_dir: Path  #: absolute

    @property
    def service(self) -> str:
        c = self.config
        runs = f"coordinator, store, trainer{_and_some(c.replicas_on(0), 'replica')}"
        return self._build_script(SERVICE, runs, [], "%j", "")

    @property
    def arrays(self) -> dict[str, JobArray]:
        """Job arrays of the run, by kind."""
        slurm, trainer = self.config.slurm, self.config.trainer
        replicas = _and_some(self.config.rollout.replicas, "replica")
        ranks = f"trainer{_and_some(trainer.ranks, 'rank')}"
        found = {
            TRAINER: JobArray(trainer.nodes - 1, slurm.trainer_spares, ranks, "--trainer-node"),
            ROLLOUT: JobArray(slurm.rollouts, slurm.spares, f"relay{replicas}", "--node"),
        }
        return {kind: array for kind, array in found.items() if array.machines}

    def build_array(self, kind: str, service_job: str = "") -> str:
        """Return the script of an array; it starts only after `service_job`, if given."""
        array = self.arrays[kind]
        options = [f"--array={array.tasks}"]
        if service_job:
            options.append(f"--dependency=after:{service_job}")
        node = f' {array.option} "$SLURM_ARRAY_TASK_ID"'
        return self._build_script(kind, array.runs, options, "%A_%a", node)

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


def _and_some(count: int, what: str) -> str:
    return f", {count} {what}{'' if count == 1 else 's'}" if count else ""
