"""Fail points: a process kills or stops itself at a named place, so that a test can say where.

Reads   LAMINAR_FAIL, "POINT:N" with commas between several: die when POINT is reached for the Nth
        time in one process; LAMINAR_STOP, likewise: stand still (SIGSTOP)
Writes  RUN/failed-POINT-N, its process id, so that it happens once in a run
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from laminar.config import ConfigError
from laminar.names.failpoint_names import POINTS

VARIABLE, STOP_VARIABLE = "LAMINAR_FAIL", "LAMINAR_STOP"
SIGNALS = {VARIABLE: signal.SIGKILL, STOP_VARIABLE: signal.SIGSTOP}
RUN_VARIABLE = "LAMINAR_FAIL_RUN"
"""The run directory, for a process that is not told otherwise."""


class FailPoints:
    """The fail points of one process."""

    def __init__(self, run_dir: Path | None) -> None:
        """None: the process belongs to no run, and passes them all."""
        self._run_dir = run_dir
        self._counts: Counter[str] = Counter()

    def hit_failpoint(self, point: str) -> None:
        """ConfigError for a variable that names no point."""
        texts = {name: text for name in SIGNALS if (text := os.environ.get(name))}
        if not texts or self._run_dir is None:
            return
        self._counts[point] += 1
        for name, text in texts.items():
            wanted = dict(_parse_entry(name, part) for part in text.split(",") if part)
            if self._counts[point] == wanted.get(point):
                self._raise_signal_once(
                    self._run_dir / f"failed-{point}-{self._counts[point]}", SIGNALS[name]
                )

    def _raise_signal_once(self, mark: Path, number: signal.Signals) -> None:
        """Have the signal, unless a process of this run has had it here."""
        try:
            with mark.open("x") as made:
                made.write(str(os.getpid()))
        except FileExistsError:
            return
        os.kill(os.getpid(), number)


def _parse_entry(variable: str, text: str) -> tuple[str, int]:
    point, _, number = text.strip().partition(":")
    if point not in POINTS or not number.isdigit() or not int(number):
        raise ConfigError(
            f"{variable} has {text!r}; give POINT:N, where POINT is one of {', '.join(POINTS)}"
        )
    return point, int(number)
