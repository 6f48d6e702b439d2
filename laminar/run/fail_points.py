"""Failpoints: named places in the code where a test can have a process kill or stop itself.

Reads   LAMINAR_FAIL, "POINT:N", several separated by commas: SIGKILL when the process reaches POINT
        for the Nth time; LAMINAR_STOP, in the same form: SIGSTOP
Writes  RUN/failed-POINT-N with the process id, so that each fires once in a run
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
RUN_VARIABLE = "LAMINAR_FAIL_RUN"  #: the run directory, for a process that gets it in no other way


class FailPoints:
    """The failpoints of one process."""

    def __init__(self, run_dir: Path | None) -> None:
        """Create the failpoints of a run; None disables them."""
        self._run_dir = run_dir
        self._counts: Counter[str] = Counter()

    def hit_failpoint(self, point: str) -> None:
        """Count a visit to `point` and raise its signal if due; ConfigError: unknown point."""
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
        """Raise the signal, unless a process of this run has already raised it here."""
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
