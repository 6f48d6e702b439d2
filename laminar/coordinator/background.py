"""Background work on a large state, in a forked process with a copy of the state.

Reads   whatever the work reads, in a copy of this process's memory
Gives   ChildBackground (ports.Background): the results, some ticks later
Writes  only the files of the work itself

The coordinator pays for the fork (some milliseconds, for the page tables) and continues. The child
does pure work, sends its result and ends without cleanup: its parent's sockets, threads and
files are left alone, and it dies with its parent. A child that fails, dies or takes too long is
counted, logged once per reason, and changes nothing else.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from laminar.run.child_channel import BlockingChannel, ChildLost, Refused
from laminar.run.child_process import fork_child

INLINE_MAX = 8_192
"""The number of trajectories up to which the work is done inline.

A fork and its page faults cost this process more than hashing them, which takes about 10 ms."""
DEADLINE_S = 120.0
"""The timeout: a snapshot of the largest state on a slow disk, and a segment compressed."""
ANSWER_MAX = 4_096
"""The maximum bytes of a reason; it fits the socket, so the child never waits for its reader."""


class WorkResult(msgspec.Struct, tag="result"):
    body: bytes


class _Worker:
    """A working child process, and the parent's end of its channel."""

    def __init__(
        self, what: str, pid: int, end: socket.socket, done: Callable[[bytes | None], None]
    ) -> None:
        self.what, self.pid, self.done = what, pid, done
        self.deadline = time.monotonic() + DEADLINE_S
        self.answer: WorkResult | Refused | None = None
        self.killed = False
        self._channel = BlockingChannel(end)

    def poll_exit(self) -> bool:
        """Return whether it has ended, with its message in `answer`; kill it after its timeout."""
        if time.monotonic() > self.deadline:
            self.kill_process()
            self.answer = Refused(f"it took more than {DEADLINE_S:.0f} s")
            return True
        if not self.try_reap():
            return False
        try:
            with self._channel.socket:
                self.answer = self._channel.receive(WorkResult | Refused)
        except ChildLost as error:
            self.answer = Refused(str(error))
        return True

    def kill_process(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._channel.socket.close()
        self.killed = True

    def try_reap(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0


class ChildBackground:
    """A Background that forks for large states and works inline on small ones."""

    def __init__(self, log: Any, here_max: int = INLINE_MAX) -> None:
        self._log, self._here_max = log, here_max
        self._children: list[_Worker] = []
        self._killed: list[_Worker] = []  #: killed children that are not yet reaped
        self.failed: Counter[tuple[str, str]] = Counter()  #: failures by work and reason

    def can_run_inline(self, size: int) -> bool:
        return size <= self._here_max

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        if self.can_run_inline(size):
            return done(work())
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = fork_child(lambda: _send_result(work, theirs))
            except OSError as error:
                ours.close()
                self._record_failure(what, str(error))
                return done(None)
        self._children.append(_Worker(what, pid, ours, done))

    def collect_results(self) -> None:
        """Deliver the results that have arrived."""
        self._killed = [child for child in self._killed if not child.try_reap()]
        for child in [child for child in self._children if child.poll_exit()]:
            self._children.remove(child)
            self._killed += [child] if child.killed else []
            if isinstance(child.answer, WorkResult):
                child.done(child.answer.body)
                continue
            self._record_failure(child.what, child.answer.reason if child.answer else "it died")
            child.done(None)

    def close(self) -> None:
        """Kill the remaining children; their results are discarded."""
        for child in self._children:
            child.kill_process()
        self._killed += self._children
        self._children.clear()

    def _record_failure(self, what: str, why: str) -> None:
        self.failed[what, why] += 1
        if self.failed[what, why] == 1:
            self._log.warning("background-work-failed", what=what, reason=why)


def _send_result(work: Callable[[], bytes], end: socket.socket) -> None:
    gc.disable()  # a collection would touch, and so copy, all memory
    answer: WorkResult | Refused
    try:
        answer = WorkResult(work())
    except Exception as error:
        answer = Refused(f"{type(error).__name__}: {error}"[:ANSWER_MAX])
    BlockingChannel(end).send(answer)
