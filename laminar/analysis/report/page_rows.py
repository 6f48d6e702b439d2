"""Layout of charts on a page: three in a row, and no row that is half empty.

Reads   charts that are drawn once their width is known
Gives   Drawn; render_rows: HTML

Each part of a page uses it to lay out its own charts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

PAGE_WIDTH, GAP, IN_A_ROW = 1320, 28, 3

Drawn = Callable[[float], str]
"""Chart that is drawn for a given width, so that letters have one size in every row."""


def render_rows(charts: Sequence[Drawn]) -> Iterator[str]:
    """Yield rows of charts; a short last row takes a chart from the row before or is stretched."""
    at = 0
    for count in _count_columns(len(charts)):
        width = (PAGE_WIDTH - GAP * (count - 1)) / count
        parts = "".join(f"<div>{chart(width)}</div>" for chart in charts[at : at + count])
        yield f'<div class="row">{parts}</div>'
        at += count


def _count_columns(number: int) -> list[int]:
    full, rest = divmod(number, IN_A_ROW)
    if rest == 1 and full:
        return [IN_A_ROW] * (full - 1) + [2, 2]
    return [IN_A_ROW] * full + ([rest] if rest else [])
