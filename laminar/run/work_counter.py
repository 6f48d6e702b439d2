"""The work that this process has done: a counter that shows whether it still moves.

Reads   nothing
Gives   count_work, called where a long piece of work advances: a pass of the model, a block or a
        tensor that is read, written, hashed or sent, a commit; get_work_count

Threads may call both: a lost increment does no harm, since only a change counts.
"""

from __future__ import annotations

_done = [0]


def count_work() -> None:
    """Count one more piece of work."""
    _done[0] += 1


def get_work_count() -> int:
    """Return the number of pieces of work that this process has done."""
    return _done[0]
