"""The guard of a process with user code: python -m laminar.run.process_guard FD MODULE ARGUMENT...

Reads   nothing; FD is a pipe or socket whose other end the guard's parent holds
Starts  a child that runs `python -m MODULE ARGUMENT...`
Gives   adopt_orphans, list_children, kill_children, reap_orphan

User code may start daemons, which leave their process group and session (setsid, double fork). On
Linux, the guard becomes the parent of such orphans (prctl(2), PR_SET_CHILD_SUBREAPER). When the
child ends, or the parent does, the guard kills all descendants, then ends as the child did. SIGTERM
makes it do so at once; SIGUSR1 is for the child.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import select
import signal
import sys
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from laminar.run.parent_death import die_with_parent

END_GRACE_S = 1.0  #: time from the parent's end to the kill, for an idle child to exit by itself
KILL_S = 5.0  #: limit for the end of killed processes, of which one may be in a system call
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of orphans from now on; OSError if the system does not support it."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become a subreaper: {os.strerror(number)}")


def list_children() -> set[int]:
    """Return the ids of this process's children, dead ones included."""
    try:
        tasks = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except FileNotFoundError:  # a thread has ended
        return list_children()
    if tasks:
        return {int(pid) for pids in tasks for pid in pids.split()}
    import psutil  # a kernel without these files; reads the files of all processes

    return {child.pid for child in psutil.Process().children()}


def kill_children(kept: Container[int] = ()) -> None:
    """Kill and reap all children but `kept`, and the orphans that this process adopts thereby."""
    denied, deadline = set[int](), time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        pids = [pid for pid in list_children() - denied if pid not in kept]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except PermissionError:  # it runs as another user
                denied.add(pid)
            except (ProcessLookupError, ChildProcessError):  # reaped by a thread of user code
                pass
        time.sleep(0.001)


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


def main(fd: str, module: str, *words: str) -> None:
    adopt_orphans()
    guard = os.getpid()
    if child := os.fork():
        _watch_child(child, int(fd))
    die_with_parent(guard)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch_child(child: int, lifeline: int) -> None:
    """Wait for the end of the child or the parent; then kill all descendants and exit."""
    signal.signal(signal.SIGCHLD, lambda *_: _reap_orphans(child))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.signal(signal.SIGUSR1, lambda number, _: os.kill(child, number))
    ended, poll = os.pidfd_open(child), select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(lifeline, 0)  # its other end was closed
    poll.poll()
    if not select.select([ended], [], [], END_GRACE_S)[0]:
        os.kill(child, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the child's id is free from now on
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_children()
    if code < 0:  # without a second core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap_orphans(child: int) -> None:
    """Reap dead orphans until the child is the next one."""
    flags = os.WEXITED | os.WNOHANG
    with suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, flags | os.WNOWAIT)) and found.si_pid != child:
            os.waitid(os.P_PID, found.si_pid, flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
