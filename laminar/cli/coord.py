"""laminar-coord: the coordinator process of a run.

    laminar-coord RUN_DIR [--resume | --resume-stopped]

RUN_DIR holds config.toml, as written by `laminar train --prepare`. When restarted on the same
directory, it recovers the state described by its log. With --resume it continues a stopped run, and
a run that cannot be resumed is refused; --resume-stopped also continues a stopped run. SIGTERM,
SIGHUP and Ctrl-C end the run gracefully, a second Ctrl-C and SIGQUIT at once. Exit codes: 0 the run
is complete, 1 it failed or an event could not be handled, 2 a mistake of the user, 130 it was
stopped before it began or at once. Restart it after 70 (it crashed) and 75 (the log could not be
written: restart it when the disk has room).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from laminar.cli.arguments import CommandParser
from laminar.config import Config, ConfigError, replace_keys
from laminar.coordinator.exit_reason import find_failure
from laminar.coordinator.loop import Coordinator
from laminar.coordinator.takeover import ResumeRequest, check_unserved
from laminar.core.state.failures import Failure, FailureKind
from laminar.core.state.state import State
from laminar.eventlog.replay import Observer
from laminar.events.base import Command, Stamped
from laminar.names.ports import DiskError
from laminar.net.addresses import own_ip
from laminar.net.auth import RunKeys
from laminar.observe.boards import Boards
from laminar.observe.logs import configure_logging, get_logger
from laminar.observe.metrics import MetricsWriter
from laminar.observe.status import REFRESH_S, StatusWriter
from laminar.observe.telemetry import Telemetry, print_last_line
from laminar.observe.warnings import WarningMonitor, first_look
from laminar.run.directory import CONFIG_FILE, SECRET_FILE, run_config
from laminar.run.lock import RunLock
from laminar.run.loop_watch import open_stacks, watch_loop
from laminar.run.permissions import check_private
from laminar.run.secret import make_missing_secret, read_secret
from laminar.run.stop_requests import add_child_option, follow_starter

WATCH_S = 1.0
TURN_REPORT_S = 1.0  #: interval between two bytes to the supervisor


def main() -> None:
    parser = CommandParser(prog="laminar-coord", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    asked = parser.add_mutually_exclusive_group()
    for asking, text in (
        (ResumeRequest.RESUME, "resume a run that was stopped, or say why it cannot be resumed"),
        (ResumeRequest.RESUME_STOPPED, "resume the run if it was stopped"),
    ):
        asked.add_argument(
            asking,
            dest="asking",
            action="store_const",
            const=asking,
            default=ResumeRequest.NOTHING,
            help=text,
        )
    add_child_option(parser)
    parser.add_argument("--turns-fd", type=int, default=None, help=argparse.SUPPRESS)
    try:
        sys.exit(_run(parser.parse_args()))
    except KeyboardInterrupt:
        failure = Failure(FailureKind.STOPPED_EARLY, signal.SIGINT.name)
    except Exception as error:
        failure = find_failure(error)
    print_last_line(f"laminar-coord: {failure.sentence}")
    sys.exit(failure.kind.record.exit_code)


def _run(arguments: argparse.Namespace) -> int:
    run_dir, asking = arguments.run_dir, arguments.asking
    config = _resolve_host(run_config(run_dir))
    if arguments.lock_fd is None:
        check_private(run_dir)
    if config.reward.scope == "auto":  # only loading the reward function tells
        raise ConfigError(
            f"{run_dir / CONFIG_FILE} has reward.scope = 'auto', so it was not prepared; write the "
            "directory with `laminar train --prepare` and these settings"
        )
    keys = _load_keys(run_dir, resume=asking == ResumeRequest.RESUME)
    lock = RunLock.inherit(run_dir, "coordinator", arguments.lock_fd)
    telemetry = configure_logging(run_dir, config.run.name, "coordinator")
    try:
        check_unserved(run_dir, keys)
        return uvloop.run(_serve_run(config, lock, keys, telemetry, asking, arguments.turns_fd))
    except Exception as failed:
        reason = lock.find_lost_reason()  # a missing directory causes other failures, too
        error = ConfigError(reason) if reason else failed
        failure = find_failure(error)
        trace = error if failure.kind == FailureKind.CRASHED else None
        fields = {"failure": failure.sentence, "failure_kind": failure.kind}
        get_logger().error("ended", **fields, exc_info=trace)
        raise error from None
    finally:
        lock.close()


def _resolve_host(config: Config) -> Config:
    """Resolve coordinator.host to this machine's address, for all servers that use it."""
    ip = own_ip(config.coordinator.host, "coordinator.host")
    return replace_keys(config, {"coordinator.host": ip})


def _load_keys(run_dir: Path, *, resume: bool) -> RunKeys:
    """Load the keys; a resumed run without a secret gets one, as in `laminar train --resume`."""
    if resume:
        try:
            make_missing_secret(run_dir)
        except OSError as error:
            raise DiskError(error.errno, f"{run_dir / SECRET_FILE}: {error.strerror}") from error
    return RunKeys(read_secret(run_dir))


async def _serve_run(
    config: Config,
    lock: RunLock,
    keys: RunKeys,
    telemetry: Telemetry,
    asking: ResumeRequest,
    turns_fd: int | None,
) -> int:
    run_dir, log = lock.run_dir, get_logger()
    boards = Boards(config, run_dir, telemetry, log)
    watch = WarningMonitor(lambda event: coordinator.report_event(event), first_look(run_dir))
    metrics = MetricsWriter(run_dir, telemetry, boards.scalars, earlier=watch.take_figures)
    status = StatusWriter(run_dir, telemetry, boards=boards.status)
    coordinator = Coordinator(
        config,
        run_dir,
        keys,
        on_replayed=Observers(log, metrics=metrics),
        on_event=Observers(log, metrics=metrics, status=status, warnings=watch),
        replay_from=metrics.replay_from,
        asking=asking,
    )
    tasks = [
        asyncio.create_task(_watch_directory(lock, coordinator)),
        asyncio.create_task(_refresh_status(status)),
        asyncio.create_task(_watch_loop(config, run_dir)),
    ]
    if turns_fd is not None:
        tasks.append(asyncio.create_task(_report_turns(turns_fd)))
    if lock.inherited:
        follow_starter(coordinator.handle_request)
    try:
        return await coordinator.run()
    finally:
        await asyncio.to_thread(boards.close)
        for task in tasks:
            task.cancel()


async def _watch_directory(lock: RunLock, coordinator: Coordinator) -> None:
    """Give up if the run's path no longer names the locked directory; a disk may answer late."""
    while not (reason := await asyncio.to_thread(lock.find_lost_reason)):
        await asyncio.sleep(WATCH_S)
    coordinator.give_up(ConfigError(reason))


async def _watch_loop(config: Config, run_dir: Path) -> None:
    """Write the stacks of this process if it makes no turn for a lease."""

    def report(seconds: float) -> None:
        get_logger().warning("loop-stood-still", seconds=round(seconds, 1))

    stacks = open_stacks(run_dir, "coordinator")
    await watch_loop(stacks, config.coordinator.lease_ms / 1000, report)


async def _refresh_status(status: StatusWriter) -> None:
    """Show that this event loop makes turns, also while no event arrives."""
    while True:
        await asyncio.sleep(REFRESH_S)
        status.refresh()


async def _report_turns(fd: int) -> None:
    """Report to the supervisor at intervals that this event loop is making turns."""
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, which is handled elsewhere
        while True:
            with contextlib.suppress(BlockingIOError):  # the supervisor itself is stalled
                os.write(fd, b".")
            await asyncio.sleep(TURN_REPORT_S)


class Observers:
    """Composite observer that never raises, so that no observer can stop the run.

    Exceptions of an observer are counted, and logged once per kind. The collected data goes into
    outlets of the telemetry (observe/telemetry.py), whose thread writes it.
    """

    def __init__(self, log: Any, **observers: Observer) -> None:
        self._log, self._observers = log, observers
        self.failed: Counter[tuple[str, type[Exception]]] = Counter()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        for name, observer in self._observers.items():
            try:
                observer(stamped, commands, state)
            except Exception as error:
                self.failed[name, type(error)] += 1
                if self.failed[name, type(error)] == 1:
                    fields = {"observer": name, "event_seq": stamped.seq}
                    self._log.error("observer-failed", **fields, exc_info=error)


if __name__ == "__main__":
    main()
