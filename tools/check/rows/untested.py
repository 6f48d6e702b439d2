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
    _row(11, "real system-call faults on laminar-coord", "20 points", "300 points, 0 acked lost"),
    _row(13, "coordinator restart, kill to first command", "p99 <= 3 s", "p99 <= 2 s"),
    _row(14, "zombies: stopped for 1.5 to 5 leases", "10", "100, 0 effects"),
    _row(18, "slow and dead nodes cost only their share", "simulated", "loss <= share + 5 points"),
    _row(19, "bounded memory", "queues <= limits", "RSS slope < 1 %/h"),
    _row(25, "bad weights are refused before use", "5 of 5", "1,000 flips"),
    _row(28, "upgrade during a run", "none", "10 runs, ledger exact"),
)
