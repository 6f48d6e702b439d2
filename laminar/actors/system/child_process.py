"""Child processes that another process forked for this one, and unregistered children.

Reads   the ends of children, by their pidfd
Gives   ForkedProcess; reap_orphan
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Container


def reap_orphan(known: Container[int], seen: int) -> int:
    """Reap a dead unknown child once it was seen twice; return the one seen now, or 0.

    Twice, because a child may end at the moment in which it becomes known.
    """
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if found is None or found.si_pid in known:
        return 0
    if found.si_pid == seen:
        os.waitid(os.P_PID, seen, os.WEXITED | os.WNOHANG)
        return 0
    return found.si_pid


class ForkedProcess:
    """A child in a running event loop, like asyncio's Process but forked in any way."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  #: exit code, or minus the signal that ended it
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._handle_exit)

    def _handle_exit(self) -> None:
        found = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
        if found is None:
            return
        exited = found.si_code == os.CLD_EXITED
        self.returncode = found.si_status if exited else -found.si_status
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._end.set_result(self.returncode)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; do nothing if the child has ended."""
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._fd, number)
            except ProcessLookupError:  # a zombie whose end is about to be reported
                pass

    def dump_stacks(self) -> None:
        self.send_signal(signal.SIGUSR2)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
