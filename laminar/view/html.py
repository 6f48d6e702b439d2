"""Pieces of HTML of the page; every text is escaped here.

Reads   nothing
Gives   STYLE; render_table, render_tiles
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root { --ink: #111827; --faint: #6b7280; --line: #e5e7eb; --accent: #2563eb; }
body, .bk-root { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
"""
INNER = """
:host { color: #111827; font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 19px; margin: 0; display: inline-block; } h3 { margin: 4px 0 6px; font-size: 15px; }
.faint { color: #6b7280; } .age { margin-left: 12px; color: #6b7280; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12px; padding: 4px 8px; }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 4px;
  vertical-align: -1px; border: 1px solid #0001; } .versions i { margin-right: 1px; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th { text-align: left; font-weight: 500; color: #6b7280; padding: 3px 10px 3px 0;
  vertical-align: top; white-space: nowrap; }
td { padding: 3px 10px 3px 0; vertical-align: top; overflow-wrap: anywhere; }
tr { border-bottom: 1px solid #eef0f3; }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f8fafc; padding: 8px;
  border-radius: 6px; margin: 4px 0 10px; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 6px 0; }
.tile { border: 1px solid #e5e7eb; border-radius: 8px; padding: 8px 14px; background: #fff; }
.tile span { display: block; font-size: 12px; color: #6b7280; } .tile b { font-size: 17px; }
.event { font-size: 14px; padding: 6px 0; } .event b { margin: 0 8px; }
.why { border-left: 3px solid #2563eb; padding: 2px 10px; margin: 4px 0 8px; font-size: 13px; }
.trouble { border-left: 3px solid #dc2626; background: #fef2f2; padding: 6px 10px; margin: 4px 0;
  font-size: 13px; }
.good { border-left: 3px solid #059669; background: #f0fdf4; padding: 6px 10px; font-size: 13px; }
.lead { font-size: 16px; margin: 4px 0 8px; }
.sample { border: 1px solid #e5e7eb; border-radius: 8px; padding: 10px 14px; margin: 8px 0; }
"""


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with the keys of the first row as its head."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{format_cell(value)}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def format_cell(value: Any) -> str:
    """Return a value as escaped text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def render_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Return figures in boxes, each with its name."""
    boxes = "".join(
        f"<div class='tile'><span>{escape(name)}</span><b>{escape(figure)}</b></div>"
        for name, figure in tiles
    )
    return f"<div class='tiles'>{boxes}</div>"
