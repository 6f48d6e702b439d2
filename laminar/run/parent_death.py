"""A process that ends when its parent does, however the parent ended.

Linux only (prctl(2), PR_SET_PDEATHSIG); a no-op elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before any fork: a child does as little as it can


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed (SIGKILL) when the thread that forked or adopted it ends.

    `parent`: the expected parent pid, if known, to detect a parent that has ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
