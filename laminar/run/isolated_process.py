"""Code of the user in a process of its own, which it may hang or end.

Starts  python -m MODULE, in a session of its own
Gives   what it says, and how it ends
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def run_isolated(
    module: str, words: Sequence[str], given: bytes, limit_s: float
) -> tuple[bytes, int]:
    """What `python -m module words` writes, and how it ends; subprocess.TimeoutExpired.

    It runs code that may hang, end its process, or start others.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(given, timeout=limit_s)
    finally:
        with suppress(ProcessLookupError):  # with all that the file has started
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return said, child.returncode
