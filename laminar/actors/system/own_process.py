"""What the actors of one process of the operating system share: its telemetry, signals and lock.

Reads   config.toml; signals; standard input, whose end says that the starter is gone
Writes  log lines, by the telemetry thread

One actor has it for itself, except emulated replicas, of which many share a process.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

from laminar.config import Config, load
from laminar.observe.logs import configure, get_logger, logger_of
from laminar.observe.telemetry import print_lines
from laminar.run.directory import CONFIG_FILE
from laminar.run.lock import RunLock
from laminar.run.stop_requests import (
    STARTER_GONE,
    follow_starter,
    handle_signals,
    not_ignored,
    stop_signals,
)

WATCH_S = 0.5


class OwnProcess:
    """This process."""

    def __init__(self, lock: RunLock, name: str, role: str) -> None:
        """`name`: of its first actor, by which its log is called."""
        self.lock, self.run_dir, self.role = lock, lock.run_dir, role
        self.config: Config = load([lock.run_dir / CONFIG_FILE])
        self.clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self.telemetry = configure(self.run_dir, self.config.run.name, name)
        self.terminal = self.telemetry.outlet("terminal", print_lines)
        self._name = name
        self._terminated: list[Callable[[str], None]] = []
        self._starter_gone: list[Callable[[], None]] = []
        self._lost: asyncio.Task[str] | None = None

    def log_of(self, name: str) -> Any:
        """Each actor has a log of its own."""
        if name == self._name:
            return get_logger()
        return logger_of(self.run_dir, self.config.run.name, name, self.telemetry)

    def listen(self, terminated: Callable[[str], None], starter_gone: Callable[[], None]) -> None:
        """Call them when a signal asks this process to end, or its starter is gone."""
        first = not self._terminated
        self._terminated.append(terminated)
        self._starter_gone.append(starter_gone)
        if first:
            self._listen()

    def _listen(self) -> None:
        handle_signals(stop_signals(), self._end_all)
        if self.role == "node":
            handle_signals(not_ignored(signal.SIGINT), self._end_all)
        else:  # a terminal's Ctrl-C goes to all processes in it, and actors wait for their node
            handle_signals([signal.SIGINT], lambda name: None)
        if self.lock.inherited:  # its starter writes to a coordinator only; only its end counts
            follow_starter(self._word)

    def _end_all(self, signal_name: str) -> None:
        for terminated in self._terminated:
            terminated(signal_name)

    def _word(self, word: str) -> None:
        if word == STARTER_GONE:
            for starter_gone in self._starter_gone:
                starter_gone()

    async def directory_lost(self) -> str:
        """Wait until the run directory is not this run's any more; why."""
        if self._lost is None:
            self._lost = asyncio.ensure_future(self._watch_directory())
        return await asyncio.shield(self._lost)

    async def _watch_directory(self) -> str:
        while not (reason := await asyncio.to_thread(self.lock.lost)):
            await asyncio.sleep(WATCH_S)
        return reason
