"""Interface to Slurm's commands, and the record of a run's jobs.

Reads   the output of sbatch, squeue, scontrol and scancel; RUN/slurm/jobs.json
Writes  RUN/slurm/jobs.json
Gives   run_slurm; check_script, enqueue_script, at_a_time, cancel_jobs; list_queued, the unfinished
        ones of some jobs; Jobs of a run, read_jobs, write_jobs; resume_command
Raises  SlurmRefused with one sentence in Slurm's own words; ConfigError if Slurm is missing or does
        not answer

Uses only output that is the same in every version since 22.05: `squeue -o`, not JSON.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar.config import ConfigError
from laminar.run.command_line import shell_command
from laminar.run.directory import SLURM_DIR
from laminar.run.renames import write_whole

JOBS_FILE = "jobs.json"
ASK_S = 60.0
"""Timeout of a command; a busy controller answers late, after the commands' own timeout."""
_UNANSWERED = "Unable to contact slurm controller"
_NOISE = re.compile(
    r"^(\w+: )?(error|fatal): |^\w+: (?=unrecognized)|^allocation failure: |^\w+ error: "
    r"|Batch job submission failed: "
)


class SlurmRefused(ConfigError):
    """Raised when Slurm refuses a request, with Slurm's own words."""


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that `laminar submit` queued for the present attempt of a run."""

    service: str  #: coordinator, store and trainer
    trainers: list[str] = []  #: job arrays of further trainer nodes, one task for each machine
    rollouts: list[str] = []  #: those of rollout machines
    tasks: int = 0  #: highest task number; 0: that of the first array, per config
    next: list[str] = []  #: for slurm.chain: the succeeding service, and its arrays
    before: int = 0  #: number of services of the chain before this one

    @property
    def arrays(self) -> list[str]:
        return [*self.trainers, *self.rollouts]

    @property
    def ids(self) -> list[str]:
        return [self.service, *self.arrays, *self.next]


def run_slurm(program: str, *words: str, text: str = "") -> str:
    """Run one of Slurm's commands and return its output; `text` is its standard input."""
    if shutil.which(program) is None:
        raise ConfigError(
            f"there is no {program} on this machine: call this on a login node of a Slurm cluster"
        )
    try:
        done = subprocess.run(
            [program, *words], input=text, capture_output=True, text=True, timeout=ASK_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{program} has not answered within {ASK_S:g} s; try again") from None
    if done.returncode != 0:
        said = _extract_error(done.stderr)
        if _UNANSWERED in said:
            raise ConfigError(f"Slurm does not answer {program}: {said}; try again when it does")
        raise SlurmRefused(f"Slurm refuses {program}: {said}")
    return done.stdout


def check_script(script: str) -> None:
    """Raise SlurmRefused unless Slurm would accept this batch script; nothing is queued."""
    run_slurm("sbatch", "--test-only", text=script)


def enqueue_script(script: Path, *options: str) -> str:
    """Queue a batch script and return the job's id; `options` override those in the script."""
    return run_slurm("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def at_a_time(array: str, tasks: int) -> None:
    """Limit an array to this number of running tasks, at least one."""
    run_slurm("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={tasks}")


def cancel_jobs(jobs: Sequence[str]) -> None:
    run_slurm("scancel", *jobs)


class SlurmTask(NamedTuple):
    """Unfinished job or array task; array tasks that have not begun may share one entry."""

    name: str  #: as scancel accepts it
    state: str
    nodes: str  #: machines where it runs; empty if none yet
    reason: str  #: why it is not running


def list_queued(jobs: Sequence[str], *, each: bool = False) -> list[SlurmTask]:
    """Return the unfinished ones of these jobs.

    With `each`, array tasks that have not begun are listed separately.
    """
    wanted = ["-r"] if each else []
    lines = run_slurm("squeue", "-h", "-a", *wanted, "-o", "%i|%A|%F|%T|%N|%r").splitlines()
    rows = [line.split("|", 5) for line in lines]
    return [
        SlurmTask(name, state, nodes, "" if reason == "None" else reason)
        for name, own, array, state, nodes, reason in rows
        if {own, array} & set(jobs)
    ]


def read_jobs(run_dir: Path) -> Jobs | None:
    """Return the jobs of a run; None if it was not submitted."""
    try:
        return msgspec.json.decode((run_dir / SLURM_DIR / JOBS_FILE).read_bytes(), type=Jobs)
    except FileNotFoundError:
        return None


def write_jobs(run_dir: Path, jobs: Jobs) -> None:
    write_whole(run_dir / SLURM_DIR / JOBS_FILE, msgspec.json.encode(jobs), durable=True)


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run on its kind of machines."""
    return shell_command("submit" if read_jobs(run_dir) else "train", "--resume", run_dir)


def _extract_error(stderr: str) -> str:
    """Extract the error from a command's stderr: its last message states the cause."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith("Try ")]
    return _NOISE.sub("", lines[-1]) if lines else "it gives no reason"
