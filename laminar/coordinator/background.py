"""Background work on a large state, in a forked process with a copy of the state.

Reads   whatever the work reads, in a copy of this process's memory
Gives   ForkedBackground (ports.Background): the results, some ticks later
Writes  only the files of the work itself

The coordinator pays for the fork (some milliseconds, for the page tables) and continues. The child
does pure work, answers through a pipe and ends without cleanup: its parent's sockets, threads and
files are left alone, and it dies with its parent. A child that fails, dies or takes too long is
counted, logged once per reason, and changes nothing else.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from laminar.run.parent_death import die_with_parent

INLINE_MAX = 8_192
"""The number of trajectories up to which the work is done inline.

A fork and its page faults cost this process more than hashing them, which takes about 10 ms."""
DEADLINE_S = 120.0
"""The timeout: a snapshot of the largest state on a slow disk, and a segment compressed."""
ANSWER_MAX = 4_096
"""The maximum bytes of a result; it fits the pipe, so the child never waits for its reader."""
_OK, _FAILED = b"+", b"-"


class _Child:
    """A working child process, and the parent's end of its pipe."""

    def __init__(self, what: str, pid: int, fd: int, done: Callable[[bytes | None], None]) -> None:
        self.what, self.pid, self.fd, self.done = what, pid, fd, done
        self.deadline = time.monotonic() + DEADLINE_S
        self.answer = b""
        self.killed = False

    def poll_exit(self) -> bool:
        """Return whether it has ended, with all output in `answer`; kill it after its timeout."""
        if time.monotonic() > self.deadline:
            self.kill_process()
            self.answer = _FAILED + f"it took more than {DEADLINE_S:.0f} s".encode()
            return True
        try:
            self.answer += os.read(self.fd, ANSWER_MAX)
        except BlockingIOError:
            return False
        if not self.try_reap():
            return False
        os.close(self.fd)
        return True

    def kill_process(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.fd)
        self.killed = True

    def try_reap(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0


class ForkedBackground:
    """A Background that forks for large states and works inline on small ones."""

    def __init__(self, log: Any, here_max: int = INLINE_MAX) -> None:
        self._log, self._here_max = log, here_max
        self._children: list[_Child] = []
        self._killed: list[_Child] = []  #: killed children that are not yet reaped
        self.failed: Counter[tuple[str, str]] = Counter()  #: failures by work and reason

    def can_run_inline(self, size: int) -> bool:
        return size <= self._here_max

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        if self.can_run_inline(size):
            return done(work())
        reading, writing = os.pipe()
        try:
            pid = _fork_child(work, writing)
        except OSError as error:
            os.close(reading)
            self._record_failure(what, str(error))
            return done(None)
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        self._children.append(_Child(what, pid, reading, done))

    def collect_results(self) -> None:
        """Deliver the results that have arrived."""
        self._killed = [child for child in self._killed if not child.try_reap()]
        for child in [child for child in self._children if child.poll_exit()]:
            self._children.remove(child)
            self._killed += [child] if child.killed else []
            if child.answer.startswith(_OK):
                child.done(child.answer[1:])
                continue
            self._record_failure(child.what, child.answer[1:].decode(errors="replace") or "it died")
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


def _fork_child(work: Callable[[], bytes], writing: int) -> int:
    """Fork a child with signals blocked; return its pid.

    Signal handlers of the child would use the parent's loop."""
    parent, signals = os.getpid(), signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        pid = os.fork()
        if pid == 0:
            _run_child(work, writing, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _run_child(work: Callable[[], bytes], writing: int, parent: int) -> NoReturn:
    """Run the work in the child and exit."""
    try:
        gc.disable()  # a collection would touch, and so copy, all memory
        die_with_parent(parent)
        os.write(writing, _compute_result(work))
    finally:
        os._exit(0)


def _compute_result(work: Callable[[], bytes]) -> bytes:
    try:
        return _OK + work()
    except Exception as error:
        return _FAILED + f"{type(error).__name__}: {error}".encode()[: ANSWER_MAX - 1]
