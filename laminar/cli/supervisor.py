"""The supervisor: what `laminar train` does while a run works.

Reads   coordinator.json of the run, exit codes of its processes, Ctrl-C
Writes  nothing; shows progress
Starts  laminar-coord, and a laminar-node for each machine played; starts a coordinator that died
        again

Ctrl-C once ends the run in good order (the step in training is completed, the model exported);
twice ends it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from laminar import exit_codes
from laminar.cli.progress import Progress
from laminar.config import Config
from laminar.coordinator.restarts import Over, Restarts
from laminar.rundir import COORDINATOR_FILE

POLL_S = 0.25
NODE_EXIT_S = 30.0
"""How long the nodes may take to leave once the coordinator has ended."""
TERM_S = 15.0
"""How long they may take once they were told to: their children have ten seconds of it."""

Process = subprocess.Popen[bytes]


class Supervisor:
    """The daemons of a run on one machine: a coordinator, and a node for each machine played."""

    def __init__(self, config: Config, run_dir: Path, console: Console) -> None:
        self.config, self.run_dir = config, run_dir
        self.progress = Progress(run_dir, console)
        self._interrupts = 0
        self._forwarded = 0
        self._restarts = Restarts(
            config.recovery.coordinator_restart_ms / 1000, config.coordinator.disk_wait_s
        )

    def run(self) -> Over:
        """Until the coordinator has ended for good, and everybody else has left."""
        self._coordinator = Served(self._start("laminar.cli.coord"), self.run_dir)
        self._nodes = [self._start_node(index) for index in range(self.config.run.nodes)]
        signal.signal(signal.SIGINT, self._interrupted)
        signal.signal(signal.SIGTERM, self._interrupted)
        with self.progress:
            over = self._watch()
        if over.reason:
            self.progress.note(f"the run is given up: {over.reason}")
        stopped = over.code in (exit_codes.COMPLETE, exit_codes.FAILED, exit_codes.STOPPED_EARLY)
        _wait(self._nodes, NODE_EXIT_S if stopped else 0.0)
        return over

    def _watch(self) -> Over:
        again_s: float | None = None  #: when the next coordinator is to be started
        while True:
            time.sleep(POLL_S)
            self.progress.update()
            self._forward_interrupts()
            now = time.monotonic()
            if again_s is not None and now >= again_s:
                self._coordinator = Served(self._start("laminar.cli.coord"), self.run_dir)
                again_s = None
            code = self._coordinator.poll(now)
            if code is None or again_s is not None:
                continue
            verdict = self._restarts.ended(code, self._coordinator.served_s(now), now)
            if isinstance(verdict, Over):
                return verdict
            again_s = now + verdict.pause_s
            self._tell_restart(code, verdict.pause_s)

    def _start_node(self, index: int) -> Process:
        """The first machine has the store and the trainer, all have a relay and replicas."""
        first = "store,trainer," if index == 0 else ""
        roles = f"{first}relay,rollout:{self.config.rollout.replicas}"
        address = f"127.0.0.{index + 1}"
        return self._start(
            "laminar.cli.node", "--name", f"node-{index}", "--roles", roles, "--host", address
        )

    def _start(self, module: str, *options: str) -> Process:
        """In a session of its own: Ctrl-C is ours to hand on."""
        return subprocess.Popen(
            [sys.executable, "-m", module, str(self.run_dir), *options], start_new_session=True
        )

    def _tell_restart(self, code: int, pause_s: float) -> None:
        what = "cannot write its log" if code == exit_codes.LOG_UNWRITABLE else "ended"
        self.progress.note(
            f"the coordinator {what} (exit code {code}); starting it again in {pause_s:.1f} s, "
            "everything else goes on"
        )

    def _interrupted(self, number: int, frame: object) -> None:
        self._interrupts += 1

    def _forward_interrupts(self) -> None:
        """The first one goes to a coordinator that listens, as soon as there is one."""
        if self._interrupts > 1:
            for process in (self._coordinator.process, *self._nodes):
                _signal_group(process, signal.SIGTERM)
            raise SystemExit(exit_codes.STOPPED_EARLY)
        if self._interrupts > self._forwarded and self._coordinator.serves:
            self._forwarded = self._interrupts
            self.progress.note(
                "stopping: the step in training is completed and the model exported; "
                "Ctrl-C again to stop at once"
            )
            self._coordinator.process.send_signal(signal.SIGINT)


class Served:
    """A coordinator process, and since when it serves: the address file then has its id."""

    def __init__(self, process: Process, run_dir: Path) -> None:
        self.process = process
        self._address = run_dir / COORDINATOR_FILE
        self._since_s: float | None = None

    def poll(self, now_s: float) -> int | None:
        """Its exit code, if it has ended."""
        if self._since_s is None and self._named():
            self._since_s = now_s
        return self.process.poll()

    def served_s(self, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    @property
    def serves(self) -> bool:
        return self._since_s is not None and self.process.poll() is None

    def _named(self) -> bool:
        try:
            return bool(json.loads(self._address.read_text())["pid"] == self.process.pid)
        except (OSError, ValueError, KeyError):
            return False


def _signal_group(process: Process, number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _wait(nodes: list[Process], leave_s: float) -> None:
    """They leave within `leave_s`, else when they are told to, else they are killed."""
    for number, wait_s in ((0, leave_s), (signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        for node in nodes:
            if number:
                _signal_group(node, number)
        deadline = time.monotonic() + wait_s
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(max(0.0, deadline - time.monotonic()))
