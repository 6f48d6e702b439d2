"""The engine steps of a replica in its timeline, kept small for runs of weeks.

Reads   rows of four int64: start, end, sequences, tokens of each step, times in unix ns
Writes  RUN/timeline/NAME.steps
Raises  OSError, PartlyWritten: the outlet counts lost items

An engine makes a hundred steps a second. The first FULL_BYTES hold each of them (two million);
after that the steps of one report (half a second) are joined into one row per time without a pause,
with 0 sequences. Times and tokens stay exact; only the times of single steps are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from laminar.analysis.log.timeline import JOIN_NS, ROW_BYTES
from laminar.observe.files import PART_BYTES, GrowingFile, cut_rows
from laminar.run.directory import TIMELINE_DIR

FULL_BYTES = PART_BYTES


class EngineSteps:
    """The steps file of one replica."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._file = GrowingFile(run_dir, f"{TIMELINE_DIR}/{name}.steps", cut_rows(ROW_BYTES))

    def write(self, items: Sequence[bytes]) -> None:
        """Write rows of steps that were reported together, ordered by start."""
        full = self._file.size >= FULL_BYTES
        self._file.write([join_steps(rows) for rows in items] if full else items)


def join_steps(data: bytes) -> bytes:
    """Join steps into one row for each time without a pause of JOIN_NS."""
    rows = np.frombuffer(data, dtype="<i8").reshape(-1, 4)
    pauses = rows[1:, 0] > np.maximum.accumulate(rows[:-1, 1]) + JOIN_NS
    begins = np.concatenate(([0], np.flatnonzero(pauses) + 1))
    together = np.zeros((len(begins), 4), dtype="<i8")
    together[:, 0] = rows[begins, 0]
    together[:, 1] = np.maximum.reduceat(rows[:, 1], begins)
    together[:, 3] = np.add.reduceat(rows[:, 3], begins)
    return together.tobytes()
