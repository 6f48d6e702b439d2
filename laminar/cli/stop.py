"""laminar stop: end a run, gracefully or at once, or pause it, and wait until it has ended.

Reads   the holders of the run directory's lock; RUN/status.json
Writes  nothing; signals the processes of the run, or asks its coordinator, and prints its progress
Gives   0 when the run has ended or did not run, 1 when it still runs at the deadline

Gracefully means as after Ctrl-C: the step in training is completed, the model exported. A pause
completes and saves it, and unfinished work continues when the run is resumed. Repeating the command
is harmless. A signal reaches only processes of this machine; a coordinator on another machine is
asked through its socket.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar.cluster.slurm import resume_command
from laminar.config import ConfigError
from laminar.events.events import DrainRequested
from laminar.names import exit_codes
from laminar.net.auth import RunKeys
from laminar.net.client import read_address
from laminar.net.user_requests import is_coordinator_alive, send_user_event
from laminar.run.command_line import shell_command
from laminar.run.directory import CONFIG_FILE, COORDINATOR_FILE, read_status, run_config
from laminar.run.lock import STOP, Holder, RunLock, format_holders, holders, list_processes
from laminar.run.secret import read_secret
from laminar.run.stop_requests import END, get_pause_timeout_ms
from laminar.weights.arena.arena import sweep_arenas

TIMEOUT_S = 600.0
"""Default timeout; a large model's step and export may take longer, and continue after it."""
KILL_AFTER_S = 45.0
"""Time before an immediate stop uses SIGKILL; the supervisor's own limits are shorter."""
KILLED_S = 5.0  #: longest time for a process to vanish after SIGKILL
SAY_S = 5.0
DECIDING = ("train", "serve", "coordinator")
"""Processes that can end the run; the first of these that is alive decides."""
PAUSING = ("train", "coordinator")
"""Processes that can pause the run. `laminar serve` would take the signal for a warning of Slurm,
and requeue the job."""
_SIGNALS = {
    (False, False): END, (True, False): signal.SIGQUIT, (False, True): signal.SIGUSR1,
}  # fmt: skip
"""Signals to the deciding process, by --now and --pause."""
_POLL_S = 0.1


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("stop")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--now",
        action="store_true",
        help="at once: neither complete the step in training nor export the model",
    )
    how.add_argument(
        "--pause",
        action="store_true",
        help="complete and save the step in training; --resume continues the rest",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for a graceful end (default {TIMEOUT_S:g})",
    )
    parser.set_defaults(function=run_stop)


def run_stop(arguments: argparse.Namespace) -> int:
    """Request the end, wait for it, and print the outcome."""
    run_dir: Path = arguments.run
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    if arguments.pause and not run_config(run_dir).trainer.save_freq:
        raise ConfigError(
            f"{run_dir} writes no checkpoints (trainer.save_freq = 0), so it cannot resume after a "
            f"pause; `{shell_command('stop', run_dir)}` ends it"
        )
    if not list_processes(run_dir):
        print(f"{run_dir} is not running")
        return exit_codes.COMPLETE
    lock = RunLock.join(run_dir, STOP)  # prevents moving the directory meanwhile
    try:
        asked = _request_stop(run_dir, at_once=arguments.now, pause=arguments.pause)
        how = "end the run at once" if arguments.now else "end the run gracefully"
        how = "pause the run" if arguments.pause else how
        print(f"asked {format_holders(asked)} to {how}", flush=True)
        ended = _wait(run_dir, KILL_AFTER_S if arguments.now else arguments.timeout)
        if not ended and arguments.now:
            ended = _kill_processes(run_dir)
        return _report_result(run_dir, arguments, ended)
    finally:
        lock.close()


def _request_stop(run_dir: Path, *, at_once: bool, pause: bool) -> list[Holder]:
    """Signal the processes in charge of the run, or ask a coordinator elsewhere; return them."""
    in_charge = _in_charge(list_processes(run_dir), DECIDING if not pause else PAUSING)
    local = [holder for holder in in_charge if holder.local]
    if in_charge and not local:
        here = socket.gethostname()
        within_ms = get_pause_timeout_ms(run_config(run_dir), "") if pause else 0
        event = DrainRequested(
            reason=f"laminar stop on {here}",
            at_once=at_once,
            pause=pause,
            response_timeout_ms=within_ms,
        )
        _ask_from_here(run_dir, in_charge, event)
        return in_charge
    for holder in local:
        asks = _SIGNALS[at_once, pause] if holder.name in DECIDING else signal.SIGTERM
        _signal_process(run_dir, holder, asks)
    return local


def _ask_from_here(run_dir: Path, in_charge: list[Holder], event: DrainRequested) -> None:
    """Ask the coordinator; if it cannot be asked, raise ConfigError with the alternative."""
    try:
        send_user_event(run_dir, event)
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} is run by {format_holders(in_charge)}, and cannot be stopped from here: "
            f"{error}; "
            f"run `{shell_command('stop', run_dir)}` there"
        ) from None


def _in_charge(living: list[Holder], deciding_names: Sequence[str]) -> list[Holder]:
    """Return the supervisor, else the coordinator, else the nodes, else all processes."""
    for name in deciding_names:
        if deciding := [holder for holder in living if holder.name == name]:
            return deciding
    return [each for each in living if each.name.startswith(("node-", "trainer-node-"))] or living


def _signal_process(run_dir: Path, holder: Holder, number: signal.Signals) -> None:
    """Signal exactly this process: check that it still has its lock once its pidfd is open."""
    try:
        fd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    try:
        if holder in holders(run_dir):
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise ConfigError(f"{format_holders([holder])} belongs to another user") from None
    finally:
        os.close(fd)


def _wait(run_dir: Path, timeout_s: float) -> bool:
    """Wait until no process is left; return False on timeout."""
    started = said = time.monotonic()
    while living := list_processes(run_dir):
        now = time.monotonic()
        if now - started >= timeout_s:
            return False
        if now - said >= SAY_S:
            said = now
            names = ", ".join(holder.name for holder in living)
            progress = _describe_progress(run_dir)
            if "coordinator" in names and _is_hung(run_dir):
                command = shell_command("stop", run_dir, "--now")
                progress = f": the coordinator does not respond; `{command}` kills it"
            print(f"[{now - started:5.0f} s] waiting for {names}{progress}", flush=True)
        time.sleep(_POLL_S)
    return True


def _is_hung(run_dir: Path) -> bool:
    """Return whether the coordinator has an address and does not respond there."""
    try:
        address = read_address(run_dir / COORDINATOR_FILE)
        keys = RunKeys(read_secret(run_dir))
        return address is not None and not is_coordinator_alive(address, keys)
    except ConfigError:  # it cannot be asked from here
        return False


def _kill_processes(run_dir: Path) -> bool:
    local = [holder for holder in list_processes(run_dir) if holder.local]
    if not local:
        return False
    print(f"killing {format_holders(local)}: still there after {KILL_AFTER_S:g} s", flush=True)
    for holder in local:
        _signal_process(run_dir, holder, signal.SIGKILL)
    ended = _wait(run_dir, KILLED_S)
    sweep_arenas()
    return ended


def _report_result(run_dir: Path, arguments: argparse.Namespace, ended: bool) -> int:
    if ended:
        print(f"{run_dir} has stopped{_describe_progress(run_dir)}")
        if arguments.pause:
            print(f"`{resume_command(run_dir)}` resumes it")
        return exit_codes.COMPLETE
    again = (
        "" if arguments.now else f"; `{shell_command('stop', run_dir, '--now')}` ends it at once"
    )
    print(
        f"laminar: {run_dir} is still running: {format_holders(list_processes(run_dir))}{again}",
        file=sys.stderr,
    )
    return exit_codes.FAILED


def _describe_progress(run_dir: Path) -> str:
    """Describe the coordinator's latest status."""
    status = read_status(run_dir)
    if not status:
        return ""
    failure = f": {status['failure']}" if status["failure"] else ""
    return f" ({status['pause'] or status['phase']}, {status['step']} steps trained{failure})"
