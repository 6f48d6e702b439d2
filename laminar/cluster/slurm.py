"""Slurm's commands, and which jobs a run has.

Reads   what sbatch, squeue, scontrol and scancel say; RUN/slurm/jobs.json
Writes  RUN/slurm/jobs.json
Gives   ask; would_take, enqueue, at_a_time, cancel, of a batch script and its job; queued, those of
        some jobs that have not ended; Jobs of a run, read_jobs, write_jobs; going_on with one
Raises  Refused with one sentence that has Slurm's own words; ConfigError where there is no Slurm,
        or none that answers

Only what every version since 22.05 prints alike is read: `squeue -o`, and no JSON.
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
"""A controller that is busy answers late; the commands themselves give up after their own time."""
_UNANSWERED = "Unable to contact slurm controller"
_NOISE = re.compile(
    r"^(\w+: )?(error|fatal): |^\w+: (?=unrecognized)|^allocation failure: |^\w+ error: "
    r"|Batch job submission failed: "
)


class SlurmRefused(ConfigError):
    """Slurm does not do what it was asked to, in its own words."""


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that `laminar submit` has put into the queue for the present attempt of a run."""

    service: str  #: coordinator, store and trainer
    rollouts: list[str] = []  #: job arrays, one task for each machine
    tasks: int = 0  #: the highest number of a task; 0: of the first array, as the config has it
    next: list[str] = []  #: of slurm.chain: the service that goes on after this one, and its array
    before: int = 0  #: how many services of the chain went before this one

    @property
    def ids(self) -> list[str]:
        return [self.service, *self.rollouts, *self.next]


def run_slurm(program: str, *words: str, text: str = "") -> str:
    """What one of Slurm's commands prints; `text` is its standard input."""
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
    """Refused unless Slurm would take this batch script; nothing is queued."""
    run_slurm("sbatch", "--test-only", text=script)


def enqueue_script(script: Path, *options: str) -> str:
    """Put a batch script into the queue; the job's id. `options` go before those in the script."""
    return run_slurm("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def at_a_time(array: str, tasks: int) -> None:
    """Let so many tasks of an array run at a time, one at least."""
    run_slurm("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={tasks}")


def cancel_jobs(jobs: Sequence[str]) -> None:
    run_slurm("scancel", *jobs)


class SlurmTask(NamedTuple):
    """A job, or one task of an array, that has not ended; several tasks that have not begun are
    one."""

    name: str  #: as scancel takes it
    state: str
    nodes: str  #: where it runs; empty: nowhere yet
    reason: str  #: why it does not run


def list_queued(jobs: Sequence[str], *, each: bool = False) -> list[SlurmTask]:
    """Those of the jobs that have not ended. `each`: of an array, also what has not begun is one
    for each task."""
    wanted = ["-r"] if each else []
    lines = run_slurm("squeue", "-h", "-a", *wanted, "-o", "%i|%A|%F|%T|%N|%r").splitlines()
    rows = [line.split("|", 5) for line in lines]
    return [
        SlurmTask(name, state, nodes, "" if reason == "None" else reason)
        for name, own, array, state, nodes, reason in rows
        if {own, array} & set(jobs)
    ]


def read_jobs(run_dir: Path) -> Jobs | None:
    """The jobs of a run; None where it was not submitted."""
    try:
        return msgspec.json.decode((run_dir / SLURM_DIR / JOBS_FILE).read_bytes(), type=Jobs)
    except FileNotFoundError:
        return None


def write_jobs(run_dir: Path, jobs: Jobs) -> None:
    write_whole(run_dir / SLURM_DIR / JOBS_FILE, msgspec.json.encode(jobs), durable=True)


def resume_command(run_dir: Path) -> str:
    """The command that goes on with a run, where its machines are."""
    return shell_command("submit" if read_jobs(run_dir) else "train", "--resume", run_dir)


def _extract_error(stderr: str) -> str:
    """The sentence in what a command says on stderr: what it says last is what it failed of."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith("Try ")]
    return _NOISE.sub("", lines[-1]) if lines else "it gives no reason"
