"""User code in a separate process, which may hang or exit.

Starts  python -m MODULE, under a guard
Gives   run_isolated: its output and exit code
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from laminar.run.process_guard import guard_command


def run_isolated(
    module: str, words: Sequence[str], given: bytes, limit_s: float
) -> tuple[bytes, int]:
    """Run `python -m module words` and return its output and exit code; TimeoutExpired.

    The process runs code that may hang, exit or start other processes; all of them are killed.
    """
    lifeline, ours = os.pipe()
    child = subprocess.Popen(
        guard_command(lifeline, module, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[lifeline],
        start_new_session=True,
    )
    os.close(lifeline)
    try:
        said, _ = child.communicate(given, timeout=limit_s)
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait()
        os.close(ours)
    return said, child.returncode
