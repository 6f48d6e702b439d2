"""Pieces of HTML of the page; every text is escaped here.

Reads   nothing
Gives   STYLE; render_table, format_cell, render_tiles
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from laminar.analysis.report import charts

STYLE = (
    """
:host, body { color: #111827; font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 19px; margin: 0; display: inline-block; } h3 { margin: 4px 0 6px; font-size: 15px; }
.faint, .age { color: #6b7280; } .age { margin-left: 12px; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12px; padding: 4px 8px; }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 1px;
  vertical-align: -1px; border: 1px solid #0001; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
tr { border-bottom: 1px solid #eef0f3; }
th, td { text-align: left; padding: 3px 10px 3px 0; vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 500; color: #6b7280; white-space: nowrap; }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f8fafc; padding: 8px;
  border-radius: 6px; margin: 4px 0 10px; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 6px 0; }
.tile, .sample { border: 1px solid #e5e7eb; border-radius: 8px; padding: 8px 14px; }
.tile span { display: block; font-size: 12px; color: #6b7280; } .tile b { font-size: 17px; }
.sample { margin: 8px 0; } .lead { font-size: 16px; margin: 4px 0 8px; }
.event { font-size: 14px; padding: 6px 0; } .event b { margin: 0 8px; }
.why, .trouble, .good { border-left: 3px solid #2563eb; padding: 3px 10px; margin: 4px 0 8px;
  font-size: 13px; }
.trouble { border-color: #dc2626; background: #fef2f2; }
.good { border-color: #059669; background: #f0fdf4; }
.row { display: flex; flex-wrap: wrap; gap: 10px 28px; margin-bottom: 18px; }
.row > div { flex: 1 1 360px; min-width: 0; } svg { width: 100%; height: auto; display: block; }
"""
    + charts.STYLE
)


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with the keys of the first row as its head."""
    if not rows:
        return ""
    lines = ["".join(f"<th>{escape(str(name))}</th>" for name in rows[0])]
    lines += ["".join(f"<td>{format_cell(value)}</td>" for value in row.values()) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def format_cell(value: Any) -> str:
    """Return a value as escaped text."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else escape(str(value))


def render_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Return figures in boxes, each with its name."""
    boxes = "".join(
        f"<div class='tile'><span>{escape(name)}</span><b>{escape(figure)}</b></div>"
        for name, figure in tiles
    )
    return f"<div class='tiles'>{boxes}</div>"
