"""slurm.chain: each service queues its successor in advance, which then continues the run.

Reads   RUN/slurm/jobs.json, RUN/slurm/*.sbatch
Writes  RUN/slurm/jobs.json, which records the current turn
Gives   JobChain: the service's handling of the jobs after its own

For clusters that do not requeue jobs: after a power failure, a preemption or a time limit without
warning, only a job that is already waiting can continue there. The successor waits for its
predecessor to end without success, so a predecessor that needs no successor cancels it; each has a
separate job array, and cancels what is left of the former one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from laminar.cluster.job_scripts import SERVICE, scripts_of
from laminar.cluster.slurm import (
    Jobs,
    cancel_jobs,
    enqueue_script,
    list_queued,
    read_jobs,
    write_jobs,
)
from laminar.config import Config, ConfigError

SUBMIT_S = 60.0
"""Longest time for `laminar submit` to record its queued jobs once the first has begun."""
POLL_S = 0.5


class JobChain:
    """Jobs after that of this service."""

    def __init__(
        self, config: Config, run_dir: Path, own: str, note: Callable[[str], None]
    ) -> None:
        self._config, self._run_dir, self._own, self._note = config, run_dir, own, note
        self._next: list[str] = []

    @property
    def successor(self) -> str:
        """Job that continues after this one; empty if there is none."""
        return self._next[0] if self._next else ""

    @property
    def follows(self) -> bool:
        """Whether this job's turn follows that of another job."""
        jobs = read_jobs(self._run_dir)
        return jobs is not None and jobs.next[:1] == [self._own]

    def take_turn(self) -> None:
        """Take the turn, and queue the successor."""
        jobs = self._wait_for_turn()
        if jobs is None:
            self._note(f"slurm.chain: job {self._own} was not submitted; none follows")
            return
        most = self._config.slurm.max_requeues
        if jobs.before >= most:
            self._note(f"slurm.chain: {most} jobs ran before, the limit of slurm.max_requeues")
        elif not jobs.next:
            try:
                jobs = self._enqueue_next(jobs)
            except ConfigError as error:
                self._note(f"slurm.chain: cannot queue the next job: {error}")
        self._next = jobs.next

    def cancel_next(self) -> None:
        """Cancel the successors, the nodes' first: they would start once the other is cancelled."""
        for job in reversed(self._next):
            try:
                cancel_jobs([job])
            except ConfigError as error:
                self._note(f"job {job} may still be in the queue: {error}")
        self._next = []

    def _wait_for_turn(self) -> Jobs | None:
        """Wait for this job's turn and return its jobs; None if the turn never comes."""
        deadline = time.monotonic() + SUBMIT_S
        while time.monotonic() < deadline:
            jobs = read_jobs(self._run_dir)
            if jobs is not None and jobs.service == self._own:
                return jobs
            if jobs is not None and jobs.next[:1] == [self._own]:
                return self._take_over(jobs)
            time.sleep(POLL_S)
        return None

    def _take_over(self, former: Jobs) -> Jobs:
        """Take the turn after these jobs, and cancel their nodes."""
        split = 2 if self._config.trainer.nodes > 1 else 1
        trainers, rollouts = former.next[1:split], former.next[split:]
        before = former.before + 1
        jobs = Jobs(service=self._own, trainers=trainers, rollouts=rollouts, before=before)
        write_jobs(self._run_dir, jobs)
        if former.arrays and list_queued(former.arrays):
            cancel_jobs(former.arrays)
        return jobs

    def _enqueue_next(self, jobs: Jobs) -> Jobs:
        """Queue the successor and its nodes."""
        scripts = scripts_of(self._config, self._run_dir)
        follows = f"--dependency=afternotok:{self._own}"
        self._next = [enqueue_script(scripts.get_path(SERVICE), follows)]
        try:
            after = f"--dependency=after:{self.successor}"
            for kind in scripts.arrays:
                self._next.append(enqueue_script(scripts.get_path(kind), after))
            jobs = msgspec.structs.replace(jobs, next=self._next)
            write_jobs(self._run_dir, jobs)
        except BaseException:
            self.cancel_next()
            raise
        self._note(f"slurm.chain: job {self.successor} continues when this one ends")
        return jobs
