"""User code in a separate process, which may hang or exit.

Starts  python -m MODULE, in a separate session
Gives   run_isolated: its output and exit code
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
    """Run `python -m module words` and return its output and exit code; TimeoutExpired.

    The process runs code that may hang, exit or start other processes; all of them are killed.
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
        with suppress(ProcessLookupError):  # with all processes that the code has started
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return said, child.returncode
