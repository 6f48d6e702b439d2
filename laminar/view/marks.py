"""Marks of the timeline: what a click on a bar tells.

Reads   a row of a table of facts; the event log, for a story
Gives   make_mark; tell_story: the lines of a mark's subject
"""

from __future__ import annotations

from html import escape
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from laminar.analysis.log.story import read_story
from laminar.config import ConfigError
from laminar.view.timeline_data import SPANS, Tables, split_source

STORY_LINES = 400
LONG = ("trajectories", "metrics", "left_out")  #: columns that are not shown


class Mark(NamedTuple):
    """Bar of the timeline."""

    text: str  #: HTML
    event: int  #: at its begin; 0: none is known
    subject: str  #: id of which the log has a story; empty: there is none


def make_mark(tables: Tables, source: int) -> Mark:
    """Return the mark of a bar: all that its row of facts has."""
    name, place = split_source(source)
    row = tables(name).slice(place, 1).to_pylist()[0]
    has_story = name not in ("replica_states", "trainer_waits")
    subject = row.get("trajectory") or (f"v{row['version']}" if has_story else "")
    title = row.get("trajectory") or row.get("state") or row.get("reason") or subject
    lines = [f"<h3>{escape(str(title))}</h3><table>"]
    for column, value in row.items():
        if value is None or column in LONG or column.endswith("_event"):
            continue
        shown = f"{value:,.3f}" if isinstance(value, float) else str(value)
        if (event := row.get(f"{column}_event")) is not None:
            shown = f"{shown} s, #{event}"
        lines.append(f"<tr><th>{column.replace('_', ' ')}</th><td>{escape(shown)}</td></tr>")
    begin = row[f"{SPANS.get(name, ('began',))[0]}_event"]
    return Mark("".join([*lines, "</table>"]), begin or 0, subject)


def tell_story(run_dir: Path, subject: str) -> list[str]:
    """Return the lines of the log about a subject."""
    try:
        lines = list(islice(read_story(run_dir, subject), STORY_LINES + 1))
    except ConfigError as error:
        return [str(error)]
    lines[STORY_LINES:] = ["..."] * (len(lines) > STORY_LINES)
    return [" ".join(line.split()) for line in lines]
