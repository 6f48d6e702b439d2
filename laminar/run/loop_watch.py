"""Stacks of a process whose event loop stands still, written by a thread of faulthandler.

Reads   the clock
Writes  logs/latest/NAME.stacks
Gives   open_stacks; watch_loop, for a task of the loop

The loop sets the thread's timer again and again. A loop that does not, because a callback computes
or waits, shows where it is. faulthandler has a single timer: `watch_loop` ends before another use.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from laminar.run.directory import LOGS_DIR

SETS = 4  #: times that the timer is set while it would expire once
DUMPS_MAX = 20  #: most stacks that one process writes


def open_stacks(run_dir: Path, name: str) -> TextIO:
    """Open the file for the stacks of a process; the terminal if the disk is full."""
    try:
        return open(run_dir / LOGS_DIR / "latest" / f"{name}.stacks", "a")
    except OSError:
        return sys.stderr


async def watch_loop(stacks: TextIO, still_s: float, report: Callable[[float], None]) -> None:
    """Have the stacks written whenever the loop makes no turn for `still_s`.

    `report`: called after that with the seconds."""
    dumps = 0
    try:
        while dumps < DUMPS_MAX:
            faulthandler.dump_traceback_later(still_s, file=stacks)
            since = time.monotonic()
            await asyncio.sleep(still_s / SETS)
            if (stood_s := time.monotonic() - since) >= still_s:
                dumps += 1
                report(stood_s)
    finally:
        faulthandler.cancel_dump_traceback_later()
