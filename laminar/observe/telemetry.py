"""Telemetry of a process, written by a background thread that never blocks the process.

Reads   items that the process puts into its outlets
Writes  through the outlets: log lines, timelines, status, metrics, the panel of a terminal
Gives   Telemetry, Outlet; print_last_line: a last line on the terminal

No write can end or block the process. Items that cannot be written are counted and dropped; after
the next successful write the loss is reported. An outlet whose writer is behind keeps a bounded
number of items and counts the rest.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

KEPT_MAX = 10_000  #: items that an outlet keeps for its writer
PAUSE_S = 0.02  #: the time between two rounds of writing; items of one round are written together
DRAIN_S = 2.0  #: time limit for the last items of a process

Item = TypeVar("Item")
Say = Callable[[str, int, str], None]


class PartlyWritten(Exception):
    """Only the first `done` items were written."""

    def __init__(self, done: int, error: Exception) -> None:
        super().__init__(str(error))
        self.done = done


class Outlet(Generic[Item]):
    """A destination; `put` never raises and never waits."""

    def __init__(
        self,
        name: str,
        write: Callable[[list[Item]], None],
        due: SimpleQueue[Callable[[], None]],
        kept: int,
    ) -> None:
        self.name = name
        self.lost_before = 0  #: items dropped because the outlet was full
        self.lost_writing = 0  #: items whose write failed
        self._write, self._due, self._kept = write, due, kept
        self._items: deque[Item] = deque(maxlen=1 if kept == 1 else None)
        self._asked = False
        self._said, self._reason = 0, ""
        self.say: Say = lambda name, lost, reason: None

    def put(self, item: Item) -> None:
        """Queue an item for writing; an outlet that keeps one item writes the newest."""
        if self._kept > 1 and len(self._items) >= self._kept:
            self.lost_before += 1
            self._reason = self._reason or "its writer is too slow"
            return
        self._items.append(item)
        if not self._asked:
            self._asked = True
            self._due.put(self.flush)

    def flush(self) -> None:
        """Write the queued items; called by the writing thread only."""
        self._asked = False
        items = [self._items.popleft() for _ in range(len(self._items))]
        if not items:
            return
        try:
            self._write(items)
        except (Exception, SystemExit) as error:  # rich exits this way when a pipe is closed
            done = error.done if isinstance(error, PartlyWritten) else 0
            self.lost_writing += len(items) - done
            self._reason = str(error) or type(error).__name__
        else:
            self._report_losses()

    def _report_losses(self) -> None:
        lost = self.lost_before + self.lost_writing
        if lost > self._said:
            news, self._said = lost - self._said, lost
            reason, self._reason = self._reason, ""
            self.say(self.name, news, reason)


class Telemetry:
    """The outlets of a process and their thread."""

    def __init__(self) -> None:
        self._due: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._say: Say | None = None
        threading.Thread(target=self._run_writer, name="telemetry", daemon=True).start()
        atexit.register(self.wait_drained, DRAIN_S)

    def add_outlet(
        self, name: str, write: Callable[[list[Item]], None], *, kept: int = KEPT_MAX
    ) -> Outlet[Item]:
        """Add an outlet; `write` is called in the thread with all waiting items, in order.

        Exceptions of `write` are counted. With `kept` = 1 only the newest item is written, and
        replaced ones do not count as lost.
        """
        outlet = Outlet(name, write, self._due, kept)
        outlet.say = self._report_loss
        return outlet

    def tell_losses(self, say: Say) -> None:
        """Have `say(outlet, items, reason)` called once an outlet works again."""
        self._say = say

    def start_sibling(self) -> Telemetry:
        """Start another thread for slow outlets, with losses reported like this one's."""
        other = Telemetry()
        other.tell_losses(self._report_loss)
        return other

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until all items put so far were tried; return False on a timeout."""
        done = threading.Event()
        self._due.put(done.set)
        return done.wait(timeout_s)

    def _report_loss(self, name: str, lost: int, reason: str) -> None:
        if self._say is not None:
            self._say(name, lost, reason)

    def _run_writer(self) -> None:
        while True:
            self._due.get()()
            if self._due.empty():
                time.sleep(PAUSE_S)


_terminal = 2  #: descriptor of the standard error that people read


def output_to(path: Path) -> None:
    """Redirect output of this process and its children to a file, except `print_lines`."""
    global _terminal
    if _terminal == 2:
        _terminal = os.dup(2)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def print_lines(lines: list[bytes]) -> None:
    """Print lines on the original standard error; for an outlet."""
    os.write(_terminal, b"".join(lines))


def print_last_line(text: str) -> None:
    """Print a last line to standard error; ignore one that is closed or blocked."""
    telemetry = Telemetry()
    telemetry.add_outlet("terminal", print_lines).put(f"{text}\n".encode(errors="replace"))
    telemetry.wait_drained(DRAIN_S)
