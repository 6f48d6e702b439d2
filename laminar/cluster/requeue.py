"""Requeueing of the jobs of a paused run; with slurm.chain, successors continue (job_chain.py).

Reads   SLURM_JOB_ID, SLURM_RESTART_COUNT and similar; RUN/slurm/jobs.json; RUN/status.json
Writes  nothing; prints its orders to Slurm, or why they fail
Gives   SlurmJob: what `laminar serve` does with its own job, and the service with those of the
        nodes

A task of the job array is held when it is requeued, since it would otherwise occupy a paid machine
while it waits for its coordinator; the next service releases it. Only a warning (SIGUSR1) is
handled this way: after SIGTERM, the fate of the job was decided by Slurm or the user.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from laminar.cluster.job_chain import JobChain
from laminar.cluster.slurm import cancel_jobs, list_queued, read_jobs, run_slurm
from laminar.config import Config, ConfigError
from laminar.names import exit_codes
from laminar.run.command_line import shell_command
from laminar.run.directory import read_status

WARNING = signal.SIGUSR1.name  #: signal that Slurm sends some time before it ends the job
LEAVE_S = 60.0  #: longest time for node tasks to end, before the requeued ones are cancelled
POLL_S = 1.0


class SlurmJob:
    """Batch job that runs this process."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        note: Callable[[str], None],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._most = config.slurm.max_requeues
        self._run_dir, self._note = run_dir, note
        array, task = (environment.get(f"SLURM_ARRAY_{k}", "") for k in ("JOB_ID", "TASK_ID"))
        self._id = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
        self._restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
        chained = config.slurm.chain and self._id
        self._chain = JobChain(config, run_dir, self._id, note) if chained else None

    @property
    def again(self) -> bool:
        """Whether Slurm started this job in place of one that has ended or is presumed ended."""
        return self._restarts > 0 or (self._chain is not None and self._chain.follows)

    def handle_service_start(self) -> None:
        """Take the turn in a chain; after a restart, release the held tasks of the nodes."""
        if self._chain is not None:
            self._chain.take_turn()
            return
        jobs = read_jobs(self._run_dir) if self._restarts else None
        for array in jobs.arrays if jobs is not None else ():
            self._run_scontrol("release", array)

    def service_ended(self, code: int, signalled: str) -> None:
        """Handle the end of the service, given its exit code and the signal that asked for it."""
        paused = code == exit_codes.PAUSED
        if self._chain is not None and not (paused and signalled):
            self._chain.cancel_next()
        if paused and self._id and signalled in ("", WARNING):
            self._handle_pause(warned=bool(signalled))

    def _handle_pause(self, *, warned: bool) -> None:
        """Continue a paused run after a warning of Slurm; a user's pause is ended by the user.

        No task stays in the queue unless this job does.
        """
        if self._chain is not None and self._chain.successor:
            self._note(f"job {self._chain.successor} resumes it")
        elif warned and self._chain is None and self._requeue_job("requeue"):
            return
        else:
            self._note(f"`{shell_command('submit', '--resume', self._run_dir)}` resumes it")
        jobs = read_jobs(self._run_dir)
        if jobs is not None and jobs.arrays:
            try:
                self._take_out(jobs.arrays)
            except ConfigError as error:
                self._note(f"jobs {' '.join(jobs.arrays)} may still be in the queue: {error}")

    def node_paused(self) -> None:
        """Requeue and hold this node's job after a pause of the run."""
        if self._id and self._chain is None:
            self._requeue_job("requeuehold")

    def node_left(self, signalled: str) -> None:
        """Requeue this node's job after a warning; hold it if the run is about to pause."""
        if self._id and self._chain is None and signalled == WARNING:
            self._requeue_job(
                "requeuehold" if read_status(self._run_dir).get("pause") else "requeue"
            )

    def _requeue_job(self, how: str) -> bool:
        """Requeue this job; return False if that fails."""
        if self._restarts >= self._most:
            self._note(
                f"job {self._id} is not requeued: it was restarted {self._restarts} times, and "
                f"slurm.max_requeues is {self._most}"
            )
            return False
        return self._run_scontrol(how, self._id)

    def _run_scontrol(self, how: str, job: str) -> bool:
        try:
            run_slurm("scontrol", how, job)
        except ConfigError as error:
            self._note(f"scontrol {how} {job}: {error}")
            return False
        self._note(f"scontrol {how} {job}")
        return True

    def _take_out(self, arrays: list[str]) -> None:
        """Cancel the tasks of nodes once none of them runs: an ending task requeues itself."""
        deadline = time.monotonic() + LEAVE_S
        while any(task.state in ("RUNNING", "COMPLETING") for task in list_queued(arrays)):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if list_queued(arrays):
            cancel_jobs(arrays)
