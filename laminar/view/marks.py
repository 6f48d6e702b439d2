"""Marks of the timeline: what a bar is called, and what a click on one tells.

Reads   tables of facts; the event log, for a story
Gives   describe_bars: texts to hover over; find_mark: the Mark under a click; tell_story: its lines
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from laminar.analysis.log.story import read_story
from laminar.config import ConfigError
from laminar.view.run_data import RunData, Tables, find_row
from laminar.view.timeline_data import Part, draw_part, split_source

STORY_LINES = 400
SHOWN = {
    "placements": ("replica", "version", "purpose", "attempt", "placement", "tokens_resumed",
                   "dispatched", "started", "left_at", "left_how", "moved_because"),
    "replica_states": ("replica", "version", "began", "ended", "cause", "detail"),
    "trainer_waits": ("step", "began", "ended", "cause", "detail"),
    "steps": ("step", "version", "ordered", "completed", "groups", "tokens", "waited", "reason"),
    "holdings": ("relay", "version", "began", "ended"),
}  # fmt: skip
"""Columns that are shown of a row, in order; NULL ones are left out."""
BEGINS = {"placements": "dispatched", "steps": "ordered"}  #: column of the begin, if not `began`


class Mark(NamedTuple):
    """Bar of the timeline."""

    text: str  #: HTML
    event: int  #: at its begin; 0: none is known
    subject: str  #: id of which the log has a story


def describe_bars(tables: Tables, bars: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Return a title and a line for each bar."""
    titles, lines = list(bars["text"]), [""] * len(bars["text"])
    by_table: dict[str, list[int]] = {}
    for number, (kind, source) in enumerate(zip(bars["kind"], bars["source"], strict=True)):
        by_table.setdefault(_find_source(kind, source)[0], []).append(number)
    for name, numbers in by_table.items():
        places = [_find_source(bars["kind"][n], bars["source"][n])[1] for n in numbers]
        rows = tables(name).take(pa.array(places, pa.int64()))
        for number, row in zip(numbers, _pick(rows, SHOWN_ON_HOVER[name]).to_pylist(), strict=True):
            titles[number] = f"{row.get('trajectory') or ''} {titles[number]}".strip()
            seconds = bars["right"][number] - bars["left"][number]
            lines[number] = f"{seconds:.3f} s{_describe_rest(row)}"
    return {"title": titles, "more": lines}


SHOWN_ON_HOVER = {
    "placements": ("trajectory", "replica", "left_how"),
    "replica_states": ("replica",),
    "trainer_waits": ("step",),
    "steps": ("step", "tokens"),
    "holdings": ("relay",),
}


def _describe_rest(row: Mapping[str, Any]) -> str:
    parts = []
    for name, value in row.items():
        if name != "trajectory" and value is not None:
            parts.append(f", {name.replace('_', ' ')} {value}")
    return "".join(parts)


def _pick(table: pa.Table, names: Sequence[str]) -> pa.Table:
    return table.select(list(names))


def _find_source(kind: str, source: int) -> tuple[str, int]:
    """Return the table of a bar, and its place there."""
    if kind == "background":
        return split_source(source)
    return ("placements" if kind == "trajectory" else "holdings"), source


def find_mark(run: RunData, x: float, y: float, part: Part) -> Mark | None:
    """Return the topmost bar at a place of the drawn part."""
    drawn = draw_part(run.timeline, part, run.lanes)
    for bars in (drawn.bars, drawn.background):
        if not bars["left"]:
            continue
        slack = (part.x1 - part.x0) / 500
        left, right = np.array(bars["left"]) - slack, np.array(bars["right"]) + slack
        top, bottom = np.array(bars["top"]), np.array(bars["bottom"])
        hit = np.flatnonzero((left <= x) & (x <= right) & (top <= y) & (y <= bottom))
        if len(hit):
            number = int(hit[-1])
            return _make_mark(
                run.table, *_find_source(bars["kind"][number], bars["source"][number])
            )
    return None


def _make_mark(tables: Tables, name: str, place: int) -> Mark:
    row = find_row(tables(name), place)
    begin = BEGINS.get(name, "began")
    subjects = {
        "placements": row.get("trajectory"),
        "holdings": f"v{row.get('version')}",
        "steps": f"v{row.get('version')}",
    }
    title = row.get("trajectory") or row.get("state") or row.get("reason") or name
    if name == "steps":
        title = f"step {row['step']}"
    cells = "".join(
        f"<tr><th>{escape(column.replace('_', ' '))}</th><td>{_format_cell(row, column)}</td></tr>"
        for column in SHOWN[name]
        if row.get(column) is not None
    )
    text = f"<h3>{escape(str(title))}</h3><table class='facts'>{cells}</table>"
    return Mark(text, row.get(f"{begin}_event") or 0, subjects.get(name) or "")


def _format_cell(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if (event := row.get(f"{column}_event")) is not None:
        return f"{value:.3f} s <span class='faint'>#{event}</span>"
    return escape(f"{value:.3f}" if isinstance(value, float) else str(value))


def tell_story(run: RunData, mark: Mark) -> list[str]:
    """Return the lines of the log about a mark's subject."""
    if not mark.subject:
        return []
    try:
        lines = list(islice(read_story(run.directory, mark.subject), STORY_LINES + 1))
    except ConfigError as error:
        return [str(error)]
    more = len(lines) > STORY_LINES
    return lines[:STORY_LINES] + (["..."] if more else [])
