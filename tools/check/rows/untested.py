"""Promises without a test, shown as "not run" so that readers do not assume them kept.

Reads   nothing
Gives   ROWS without a run
"""

from __future__ import annotations

from tools.check.rows.base import Row


def _row(number: int, promise: str, pr: str, release: str) -> Row:
    return Row(number, promise, pr, release, None)


ROWS = (
    _row(2, "fault schedules at 1,024 GPUs", "5 seeds, 0 violations", "500 seeds, 0 violations"),
)
