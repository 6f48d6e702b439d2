"""laminar serve: run one machine's part of a run in the foreground, for a batch system.

Reads   a run directory written by `laminar train --prepare`, exit codes, signals
Writes  standard output, lines; logs/attempt_N when a run is resumed, summary.json at its end
Starts  without --node the coordinator and node-0, through the supervisor; with --node K that
        node; restarts processes that died

    laminar serve RUN                     the service: begins or resumes the run
    laminar serve RUN --node K            its node-K, which may be started before or after it
    laminar serve RUN --trainer-node K    its trainer-node-K, as early or late

It ends after everything that it started. In a Slurm job it requeues that job after a pause
(requeue.py); a requeued job stands by while the run is still served.

Exit codes of the service: those of its last coordinator. Of a node: 0 the run is over, or a signal
asked it to leave; 85 the run is paused; 2 a mistake of the user; 3 it had no coordinator, or was
refused, as often as recovery.max_restarts allows; other codes: its node died as often.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from laminar.cluster.requeue import WARNING, SlurmJob
from laminar.cluster.slurm import resume_command
from laminar.config import Config, ConfigError
from laminar.coordinator.takeover import ResumeRequest, check_unserved
from laminar.launch.node_restarts import NodeRestarter
from laminar.launch.supervisor import (
    POLL_S,
    TERM_S,
    Process,
    StopRequest,
    Supervisor,
    node_args,
    start_daemon,
)
from laminar.launch.terminal import Terminal
from laminar.launch.train import report_end
from laminar.names import exit_codes
from laminar.names.ids import is_trainer_node, node_index, trainer_node
from laminar.net.addresses import own_name
from laminar.net.auth import RunKeys
from laminar.observe.logs import create_attempt
from laminar.run.directory import EVENTS_DIR, STATUS_FILE, read_status, run_config
from laminar.run.lock import AlreadyServed, RunLock, holders, in_use
from laminar.run.permissions import check_private
from laminar.run.secret import read_secret
from laminar.weights.arena.arena import sweep_arenas

SERVICE = "node-0"  #: node of the service, which has the store and the trainer
STAND_BY_S = 3600.0
"""Longest time that a Slurm job stands by for a run that its former copy still serves."""
STAY_S = 15.0  #: longest time between Slurm's warnings of the service and of a trainer node
STAND_BY_POLL_S = 1.0  #: poll interval, well below the time for which nodes wait for a coordinator


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group()
    text = "run node-K; without it, the coordinator and node-0"
    which.add_argument("--node", type=int, default=0, metavar="K", help=text)
    text = "run trainer-node-K, with ranks of the trainer"
    which.add_argument("--trainer-node", type=int, metavar="K", help=text)
    parser.set_defaults(function=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Run the service or a node until it has ended; return its exit code."""
    run_dir, name = arguments.run, _name_node(arguments)
    config = run_config(run_dir)
    check_private(run_dir)
    keys = RunKeys(read_secret(run_dir))
    console = Terminal(plain=True)
    with StopRequest() as asked:
        if name == SERVICE:
            return _run_service(config, run_dir, keys, asked, console)
        holder = f"serve-{name.removeprefix('node-')}"
        with contextlib.closing(RunLock.join(run_dir, holder)) as lock:
            console.print_lines([f"{name} of {run_dir}, on {own_name()}"])
            code = NodeKeeper(config, lock, name, asked, console).run()
        job = SlurmJob(config, run_dir, lambda text: console.print_lines([text]))
        if code == exit_codes.PAUSED:
            job.node_paused()
        elif asked.level:
            job.node_left(asked.reason)
        return code


def _name_node(arguments: argparse.Namespace) -> str:
    """Return the name of the node to run; raise ConfigError for a number that no node has."""
    number = arguments.trainer_node
    name = f"node-{arguments.node}" if number is None else trainer_node(number)
    try:
        node_index(name)
    except ValueError as error:
        raise ConfigError(f"{error}") from None
    return name


def _run_service(
    config: Config, run_dir: Path, keys: RunKeys, asked: StopRequest, console: Terminal
) -> int:
    """Run the coordinator and node-0; return the exit code."""
    job = SlurmJob(config, run_dir, lambda text: console.print_lines([text]))
    code = exit_codes.USER_ERROR
    try:
        with contextlib.closing(_take_in_turn(run_dir, keys, job, asked, console)) as lock:
            console.print_lines([f"coordinator and {SERVICE} of {run_dir}, on {own_name()}"])
            job.handle_service_start()
            over = Supervisor(
                config, lock, console, asked, asking=ResumeRequest.RESUME_STOPPED, nodes=[SERVICE]
            ).run()
            code = over.code
            if code != exit_codes.USER_ERROR or over.failure:  # else the coordinator has said so
                code = report_end(run_dir, console, over).code
    finally:
        job.service_ended(code, asked.reason)
    return code


def _take_in_turn(
    run_dir: Path, keys: RunKeys, job: SlurmJob, asked: StopRequest, console: Terminal
) -> RunLock:
    """Join the run at once, or stand by until the job that this one replaces is gone.

    The former job outlives a crash of Slurm's daemon, which kills it when restarted; if this job
    had ended by then, no job would be left.
    """
    deadline, stood_by = time.monotonic() + STAND_BY_S, False
    while True:
        try:
            return _join_run(run_dir, keys, stood_by)
        except AlreadyServed as error:
            if not job.again or asked.level or time.monotonic() > deadline:
                raise
            if not stood_by:
                console.print_lines([f"standing by for at most {STAND_BY_S / 60:g} min: {error}"])
            stood_by = True
        time.sleep(STAND_BY_POLL_S)


def _join_run(run_dir: Path, keys: RunKeys, stood_by: bool) -> RunLock:
    """Join a run that has no service; a resumed run gets new logs.

    A run that was paused during standby is left alone. The former copy's status is final only once
    the lock is held.
    """
    lock = RunLock.join(run_dir, "serve")
    try:
        if any(each.name in ("train", "coordinator") for each in holders(run_dir)):
            raise AlreadyServed(in_use(run_dir))
        check_unserved(run_dir, keys)
        if stood_by and read_status(run_dir).get("pause") == "paused":
            going = resume_command(run_dir)
            raise ConfigError(f"{run_dir} was paused meanwhile: `{going}` resumes it")
        if (run_dir / EVENTS_DIR).is_dir():
            create_attempt(run_dir)
            (run_dir / STATUS_FILE).unlink(missing_ok=True)  # left by the former attempt
        return lock
    except BaseException:
        lock.close()
        raise


class NodeKeeper:
    """Keeper of one laminar-node, restarted when it dies."""

    def __init__(
        self, config: Config, lock: RunLock, name: str, asked: StopRequest, console: Terminal
    ) -> None:
        self._config, self._lock, self._asked, self._console = config, lock, asked, console
        self._name = name
        self._warned_s = 0.0
        self._nodes = NodeRestarter(config, [name], self._start, self._print_note)

    def run(self) -> int:
        """Watch the node until it is final or asked to leave; return the exit code."""
        self._nodes.start_all(self._start)
        while (code := self._nodes.get_exit_code()) is None:
            time.sleep(POLL_S)
            if self._asked.level and not self._is_needed():
                self._end_nodes()
                code = exit_codes.COMPLETE
                break
            self._nodes.restart_ended(time.monotonic())
        if code == exit_codes.COMPLETE and not self._asked.level:
            self._print_note(f"{self._name} leaves: the run is over")
        sweep_arenas()  # left by a relay that was killed together with its node
        return code if code >= 0 else exit_codes.SIGNALLED - code

    def _is_needed(self) -> bool:
        """Return whether a warned node stays: a run that pauses completes its step on all ranks."""
        if not is_trainer_node(self._name) or self._asked.reason != WARNING:
            return False
        self._warned_s = self._warned_s or time.monotonic()
        in_time = time.monotonic() < self._warned_s + STAY_S
        return in_time or bool(read_status(self._lock.run_dir).get("pause"))

    def _start(self, name: str) -> Process:
        return start_daemon(self._lock, "laminar.cli.node", *node_args(self._config, name))

    def _print_note(self, text: str) -> None:
        self._console.print_lines([text])

    def _end_nodes(self) -> None:
        """End the node, whose processes end first; kill it if that takes too long."""
        for name, process in self._nodes:
            if process.poll() is None:
                self._print_note(f"ending {name} ({self._asked.reason})")
                os.killpg(process.pid, signal.SIGTERM)
                self._wait_for(process)

    def _wait_for(self, process: Process) -> None:
        deadline = time.monotonic() + TERM_S
        while process.poll() is None:
            if time.monotonic() > deadline or self._asked.level == StopRequest.BY_FORCE:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(POLL_S / 5)
