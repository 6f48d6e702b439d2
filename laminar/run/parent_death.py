"""A process that ends when its parent does, however that ended.

Linux only (prctl(2), PR_SET_PDEATHSIG): elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before any fork: a child does as little as it can


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL for this process when the thread that forked or has adopted it is gone. `parent` is
    the pid that it is to have, where it is known: one that has ended before is noticed, too."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
