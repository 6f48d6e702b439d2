"""Fail points: a process kills itself at a named place, so that a test can say where it dies.

Reads   LAMINAR_FAIL, "POINT:N" with commas between several: die when POINT is reached for the Nth
        time in one process
Writes  RUN/failed-POINT-N, so that it happens once in a run
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from laminar.config import ConfigError
from laminar.names.points import POINTS

VARIABLE = "LAMINAR_FAIL"
RUN_VARIABLE = "LAMINAR_FAIL_RUN"
"""The run directory, for a process that is not told otherwise."""


class FailPoints:
    """The fail points of one process."""

    def __init__(self, run_dir: Path | None) -> None:
        """None: the process belongs to no run, and passes them all."""
        self._run_dir = run_dir
        self._counts: Counter[str] = Counter()

    def reached(self, point: str) -> None:
        """ConfigError for a variable that names no point."""
        text = os.environ.get(VARIABLE, "")
        if not text or self._run_dir is None:
            return
        self._counts[point] += 1
        wanted = dict(map(_parsed, filter(None, text.split(","))))
        if self._counts[point] != wanted.get(point):
            return
        try:
            (self._run_dir / f"failed-{point}-{self._counts[point]}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def _parsed(text: str) -> tuple[str, int]:
    point, _, number = text.strip().partition(":")
    if point not in POINTS or not number.isdigit() or not int(number):
        raise ConfigError(
            f"{VARIABLE} has {text!r}; give POINT:N, where POINT is one of {', '.join(POINTS)}"
        )
    return point, int(number)
