"""Answers about repack: what it found at its searches.

Reads   rows of the table `repack_decisions`
Gives   one_decision, decision_lines: sentences
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from laminar.analysis.facts.repack_reasons import REASONS
from laminar.analysis.why.wording import Row, format_time, format_times


def one_decision(row: Row) -> str:
    """Return the sentence about one decision."""
    detail = f" ({row['detail']})" if row["detail"] else ""
    return (
        f"At {format_time(row, 'searched')}, with {row['running']} trajectories of "
        f"v{row['version']}, repack found: {REASONS[row['reason']]}{detail}."
    )


def decision_lines(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the count of each reason, with the last time that it applied."""
    for reason, count in Counter(row["reason"] for row in rows).most_common():
        last = [row for row in rows if row["reason"] == reason][-1]
        detail = f" ({last['detail']})" if last["detail"] else ""
        when = f"{'at' if count == 1 else 'last at'} {format_time(last, 'searched')}"
        yield f"  {format_times(count)}, {when}: {REASONS[reason]}{detail}"
