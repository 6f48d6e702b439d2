"""Supervisor: the part of `laminar train` and `laminar serve` that watches over a run.

Reads   coordinator.json of the run, exit codes of its processes, signals; a byte from the
        coordinator for each second in which it makes turns
Writes  requests to the standard input of the coordinator; shows progress
Starts  laminar-coord, and a laminar-node for each of its machines (node_restarts.py); restarts
        those that died, and kills a coordinator that stalls

Ctrl-C, SIGTERM or SIGHUP end the run gracefully (the step in training is completed, the model
exported); a second Ctrl-C or SIGQUIT ends it at once, a third kills what is left. SIGUSR1, and in a
batch job SIGTERM, pause it. If this process is killed, its daemons see that their standard input is
closed, and end the run gracefully, or pause it in a batch job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from laminar.config import Config
from laminar.coordinator.restarts import GiveUp, Restarts
from laminar.coordinator.takeover import ResumeRequest
from laminar.core.state.failures import FailureKind
from laminar.launch.node_restarts import NodeRestarter
from laminar.launch.panel import ProgressPanel
from laminar.launch.prefork import PreforkedNode
from laminar.names import exit_codes
from laminar.names.ids import is_trainer_node, node_index
from laminar.net.addresses import ip_of
from laminar.run.directory import COORDINATOR_FILE
from laminar.run.lock import RunLock
from laminar.run.stop_requests import DRAIN, NOW, PAUSE, pause_signals, stop_signals
from laminar.weights.arena.arena import sweep_arenas

POLL_S = 0.25
NODE_EXIT_S = 30.0  #: longest time for the nodes to leave once the coordinator has ended
AT_ONCE_S = 20.0  #: longest time for the coordinator to tell all processes that the run has ended
NOTICE_S = 5.0  #: longest time for all processes to notice that the run directory is gone
TERM_S = 15.0  #: longest time to end after SIGTERM; the processes' children have ten seconds of it

STILL_S = 30.0  #: longest time without a turn of the coordinator; most disk stalls are shorter

TURNS_MAX = 4096  #: bytes read at once: more than a coordinator writes between two polls

Process = subprocess.Popen[bytes]


def node_args(config: Config, node: str) -> list[str]:
    """Return the options of a laminar-node."""
    roles = ",".join(f"{role}:{count}" for role, count in config.processes_on(node))
    words = ["--name", node, "--roles", roles]
    if ip_of(config.coordinator.host, "coordinator.host").startswith("127."):
        number = node_index(node)
        own = f"1.{number}" if is_trainer_node(node) else f"0.{number + 1}"
        return [*words, "--host", f"127.0.{own}"]
    return words  # the node listens on its address on the way to the coordinator


def start_daemon(lock: RunLock, module: str, *options: str, fds: Sequence[int] = ()) -> Process:
    """Start a daemon in a separate session, so that only this process forwards Ctrl-C.

    The daemon notices the end of this process by its closed stdin. It inherits `fds`, too.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, str(lock.run_dir), *options, "--lock-fd", str(lock.fd)],
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=(lock.fd, *fds),
        start_new_session=True,
    )


class Supervisor:
    """Supervisor of a run's daemons on one machine: a coordinator, and a node per machine."""

    def __init__(
        self,
        config: Config,
        lock: RunLock,
        console: Console,
        asked: StopRequest,
        early: Sequence[PreforkedNode] = (),
        *,
        asking: ResumeRequest = ResumeRequest.NOTHING,
        nodes: Sequence[str] | None = None,
    ) -> None:
        """Initialize the supervisor.

        `early`: nodes started already. `asking`: whether to continue a stopped run. `nodes`: those
        of this supervisor, if others have the rest; None: all, and the run is not shared.
        """
        self.config, self.run_dir, self._lock = config, lock.run_dir, lock
        self._alone = nodes is None
        self.progress = ProgressPanel(lock.run_dir, console, begun_ns=asked.begun_ns)
        self._asked, self._asking = asked, asking
        self._early = dict(zip(config.node_names, early, strict=False))
        self._told = StopRequest.NOTHING  #: level known to the present coordinator
        names = config.node_names if nodes is None else nodes
        self._nodes = NodeRestarter(config, names, self._start_node, self.progress.add_note)
        self._restarts = Restarts(
            config.recovery.coordinator_restart_ms / 1000,
            config.coordinator.disk_full_timeout_s,
            config.coordinator.stall_timeout_s,
        )

    def run(self) -> GiveUp:
        """Watch until the coordinator has ended for good, and all other processes have left."""
        self._start_coordinator()
        if self._alone:
            self._nodes.start_all(self._start_first)
        with self.progress:
            over = self._watch_processes()
            if over.failure and not self._lock.find_lost_reason():  # printed last
                self.progress.add_note(f"the run cannot continue: {over.failure.sentence}")
            self._end_processes(self._leave_s(over))
        sweep_arenas()  # left by a relay that was killed together with its node
        return over

    def _leave_s(self, over: GiveUp) -> float:
        """Return how long the other processes may take to end by themselves."""
        if self._lock.find_lost_reason():
            return NOTICE_S
        told = over.code != exit_codes.USER_ERROR and over.code in exit_codes.FINAL
        return NODE_EXIT_S if told and over.failure is None else 0.0

    def _watch_processes(self) -> GiveUp:
        again_s: float | None = None  #: time of the coordinator's next start
        while True:
            time.sleep(POLL_S)
            self.progress.update()
            if over := self._given_up(again_s is not None):
                return over
            now = time.monotonic()
            if again_s is not None and now >= again_s:
                self._start_coordinator()
                again_s = None
            self._forward_request()
            if self._asked.level < StopRequest.NOW:
                self._nodes.restart_ended(now)
            code = self._coordinator.poll(now)
            if self._coordinator.kill_if_stalled():
                self.progress.add_note(
                    f"the coordinator made no progress for {STILL_S:g} s: killed"
                )
            if self._coordinator.has_served:
                self._asking = ResumeRequest.NOTHING
            if code is None or again_s is not None:
                self._start_late_nodes()
                continue
            verdict = self._restarts.decide_restart(
                code,
                self._coordinator.served_s(now),
                now,
                stood_still=self._coordinator.stood_still,
            )
            if isinstance(verdict, GiveUp):
                return verdict
            again_s = now + verdict.pause_s
            self._tell_restart(code, verdict.pause_s)

    def _start_late_nodes(self) -> None:
        """Start nodes of a shared run once the coordinator serves.

        A node takes the name of a possibly live one; a serving coordinator proves that no other
        process serves the run.
        """
        if self._coordinator.has_served and not self._nodes.begun:
            self._nodes.start_all(self._start_first)

    def _given_up(self, no_coordinator: bool) -> GiveUp | None:
        """Return the reason to end the run without its coordinator, or None."""
        if reason := self._lock.find_lost_reason():
            return GiveUp.after_failure(FailureKind.USER_MISTAKE, str(self.run_dir), reason)
        if self._asked.level < StopRequest.NOW:
            return None
        overdue = self._asked.since_now_s() > AT_ONCE_S
        if no_coordinator or overdue or self._asked.level == StopRequest.BY_FORCE:
            return GiveUp.after_failure(FailureKind.STOPPED, self._asked.reason)
        return None

    def _start_coordinator(self) -> None:
        options = (self._asking,) if self._asking else ()

        def start(turns: int) -> Process:
            words = (*options, "--turns-fd", str(turns))
            return self._start("laminar.cli.coord", *words, fds=(turns,))

        self._coordinator = CoordinatorProcess(start, self.run_dir / COORDINATOR_FILE)
        self._told = StopRequest.NOTHING

    def _start_first(self, name: str) -> Process:
        """Return the pre-started node, or start a new one if it has died."""
        if early := self._early.get(name):
            words = [str(self.run_dir), *node_args(self.config, name)]
            with contextlib.suppress(ConnectionError):  # killed with all that was starting
                return early.start_node(words, self._lock.fd)
        return self._start_node(name)

    def _start_node(self, name: str) -> Process:
        return self._start("laminar.cli.node", *node_args(self.config, name))

    def _start(self, module: str, *options: str, fds: Sequence[int] = ()) -> Process:
        return start_daemon(self._lock, module, *options, fds=fds)

    def _tell_restart(self, code: int, pause_s: float) -> None:
        what = "cannot write its log" if code == exit_codes.LOG_UNWRITABLE else "ended"
        when = f" in {pause_s:.1f} s" if pause_s else ""
        self.progress.add_note(
            f"the coordinator {what} (exit code {code}); restarting it{when}, "
            "everything else continues"
        )

    def _forward_request(self) -> None:
        """Forward a new stop request to the coordinator; one that is starting reads it later."""
        level, reason = self._asked.level, self._asked.reason
        if level <= self._told:
            return
        first, self._told = self._told == StopRequest.NOTHING, level
        if level == StopRequest.PAUSE:
            self.progress.add_note(
                f"pausing ({reason}): the step in training is completed and saved; "
                "Ctrl-C to end the run instead"
            )
        elif level == StopRequest.DRAIN:
            self.progress.add_note(
                f"stopping ({reason}): the step in training is completed and the model exported; "
                "Ctrl-C again to stop at once"
            )
        elif not first or level == StopRequest.NOW:
            self.progress.add_note(
                f"stopping at once ({reason}); Ctrl-C again to kill what is left"
            )
        stdin = self._coordinator.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its successor gets the request
            word = {StopRequest.PAUSE: PAUSE, StopRequest.DRAIN: DRAIN}.get(level, NOW)
            stdin.write(f"{word} {reason}\n".encode())

    def _end_processes(self, leave_s: float) -> None:
        """End the processes: wait `leave_s`, then send SIGTERM, then SIGKILL."""
        for number, wait_s in ((0, leave_s), (signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
            if number == signal.SIGKILL:  # a coordinator that ends gracefully has no time limit
                self._coordinator.process.kill()
            for name, node in self._nodes:
                if number and node.poll() is None:
                    self.progress.add_note(f"ending {name} ({signal.Signals(number).name}) ...")
                    os.killpg(node.pid, number)
            self._wait_for_processes(wait_s, killed=number == signal.SIGKILL)

    def _wait_for_processes(self, wait_s: float, *, killed: bool) -> None:
        deadline = time.monotonic() + wait_s
        for process in (*(node for _, node in self._nodes), self._coordinator.process):
            while process.poll() is None and time.monotonic() < deadline:
                if self._asked.level == StopRequest.BY_FORCE and not killed:
                    return
                time.sleep(POLL_S / 5)


class StopRequest:
    """Stop request made by signals, or by a program: the highest of five levels, and the signal.

    SIGTERM and SIGHUP request a graceful end, however often they come; SIGUSR1, and in a batch job
    SIGTERM, a pause. Ctrl-C requests an end, and one level more each time; SIGQUIT an immediate
    end.
    """

    NOTHING, PAUSE, DRAIN, NOW, BY_FORCE = range(5)

    def __init__(self) -> None:
        self.level, self.reason = self.NOTHING, ""
        self.begun_ns = 0  #: time of the start; 0: the start of this process
        self._now_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Install the signal handlers until exit; only the main thread can do so."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (*stop_signals(), *pause_signals(), signal.SIGINT, signal.SIGQUIT):
            self._before[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_level(self, level: int, reason: str) -> None:
        """Request what `level` stands for, unless more has been requested."""
        if level > self.level:
            self.level, self.reason = level, reason
            if level == self.NOW:
                self._now_s = time.monotonic()

    def since_now_s(self) -> float:
        """Return the seconds since an immediate end was requested."""
        return time.monotonic() - self._now_s

    def _handle_signal(self, number: int, frame: object) -> None:
        more = min(max(self.level + 1, self.DRAIN), self.BY_FORCE)
        wanted = {
            **dict.fromkeys(pause_signals(), self.PAUSE),
            signal.SIGINT: more,
            signal.SIGQUIT: self.NOW,
        }.get(signal.Signals(number), self.DRAIN)
        self.raise_level(wanted, signal.Signals(number).name)


class CoordinatorProcess:
    """Coordinator process, with the time since which it serves, shown by its address file."""

    def __init__(self, start: Callable[[int], Process], address: Path) -> None:
        """Start the process with `start`, which gets the descriptor for the coordinator's turns.

        An earlier `address` file is ignored: its process id may be in use on another machine.
        """
        self._address, self._before = address, _identify_file(address)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._turns = open(reading, "rb", buffering=0)  # noqa: SIM115
        try:
            self.process = start(writing)
        finally:
            os.close(writing)
        self._since_s: float | None = None
        self._still = 0  #: polls since its last turn, after its first
        self._turned = False
        self.stood_still = False  #: whether it was killed because it made no more turns

    def poll(self, now_s: float) -> int | None:
        """Return the coordinator's exit code, if it has ended."""
        if self._since_s is None and self._has_address():
            self._since_s = now_s
        code = self.process.poll()
        if code is None:
            turned = bool(self._turns.read(TURNS_MAX))
            self._turned = self._turned or turned
            self._still = 0 if turned else self._still + 1
        else:
            self._still = 0
            self._turns.close()
        return code

    def kill_if_stalled(self) -> bool:
        """Kill the coordinator if it makes no more turns; return whether it was killed.

        The time is counted in polls, so a pause of the whole machine does not count.
        """
        if not self._turned or self._still * POLL_S <= STILL_S:
            return False
        self._still = 0  # it may take a while to end, in an uninterruptible call
        self.stood_still = True
        self.process.kill()
        return True

    def served_s(self, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    @property
    def has_served(self) -> bool:
        return self._since_s is not None

    def _has_address(self) -> bool:
        try:
            ours = bool(json.loads(self._address.read_text())["pid"] == self.process.pid)
        except (OSError, ValueError, KeyError):
            return False
        return ours and _identify_file(self._address) != self._before


def _identify_file(path: Path) -> tuple[int, int] | None:
    """Return an identity that changes when a file is renamed to this path; None if missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
