"""Tabs of figures: the overview of all runs, and the health of one.

Reads   RunData
Gives   FigureTab; make_overview, make_health
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import panel as pn
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from laminar.view import overview_data
from laminar.view.colours import VERSION_HUES
from laminar.view.html import render_table
from laminar.view.overview_data import Curve
from laminar.view.run_data import RunData
from laminar.view.timeline_data import Tables

PROCESSES_SHOWN = 200


class FigureTab:
    """Charts with a line per run, and text."""

    def __init__(
        self,
        runs: Sequence[RunData],
        list_curves: Callable[[Tables], list[Curve]],
        render_text: Callable[[Sequence[RunData]], str],
        *,
        text_first: bool,
    ) -> None:
        self._runs, self._list_curves, self._render_text = runs, list_curves, render_text
        self._revisions: list[int] = []
        self._sources: list[list[ColumnDataSource]] = []
        self._charts: list[Any] = []  #: made when they are first shown
        self._text = pn.pane.HTML("", sizing_mode="stretch_width")
        self._grid = pn.GridBox(ncols=2, sizing_mode="stretch_width")
        parts = [self._text, self._grid] if text_first else [self._grid, self._text]
        self.view = pn.Column(*parts, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """Write everything again if a run has new events; leave out charts without values."""
        revisions = [run.revision for run in self._runs]
        if revisions == self._revisions:
            return
        self._revisions = revisions
        self._text.object = self._render_text(self._runs)
        for place, run in enumerate(self._runs):
            curves = self._list_curves(run.table)
            self._charts = self._charts or [self._make_chart(curve.title) for curve in curves]
            for curve, sources in zip(curves, self._sources, strict=True):
                x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
                sources[place].data = {"x": list(x), "y": list(y)}
        shown = [any(len(s.data["x"]) for s in sources) for sources in self._sources]
        self._grid[:] = [chart for chart, has in zip(self._charts, shown, strict=True) if has]

    def _make_chart(self, title: str) -> Any:
        made = figure(title=title, height=240, sizing_mode="stretch_width", tools="")
        made.toolbar_location = made.outline_line_color = None
        made.xgrid.visible = False
        made.title.text_font_style = "normal"
        self._sources.append([ColumnDataSource({"x": [], "y": []}) for _ in self._runs])
        for place, source in enumerate(self._sources[-1]):
            colour = _find_colour(place)
            made.line("x", "y", source=source, line_color=colour, line_width=2)
            made.scatter("x", "y", source=source, color=colour, size=4)
        made.add_tools(HoverTool(tooltips="@x{0,0.[0]}: @y{0,0.[0000]}", mode="vline"))
        return pn.pane.Bokeh(made, sizing_mode="stretch_width")


def make_overview(runs: Sequence[RunData]) -> FigureTab:
    return FigureTab(runs, overview_data.list_curves, _render_runs, text_first=True)


def make_health(run: RunData) -> FigureTab:
    return FigureTab([run], overview_data.list_health_curves, _render_health, text_first=False)


def _find_colour(place: int) -> str:
    """Return the colour of a run; neighbours differ much."""
    return VERSION_HUES[place * 5 % len(VERSION_HUES)]


def _render_runs(runs: Sequence[RunData]) -> str:
    """Return a sentence about each run, and its problems."""
    parts = []
    for place, run in enumerate(runs):
        text = overview_data.describe_run(run.table, run.state, run.timeline.seconds)
        name = (
            f"<b style='color:{_find_colour(place)}'>{escape(run.name)}</b> "
            if len(runs) > 1
            else ""
        )
        parts.append(f"<p class='lead'>{name}{escape(text)}</p>")
        problems = overview_data.list_problems(run.table, run.state)
        parts += [f"<div class='trouble'>{escape(problem)}</div>" for problem in problems]
        parts += [] if problems else ["<div class='good'>No warnings.</div>"]
    return "".join(parts)


def _render_health(runs: Sequence[RunData]) -> str:
    processes = overview_data.list_processes(runs[0].table, runs[0].state)
    parts = ["<h3>Processes</h3>", render_table(processes[:PROCESSES_SHOWN])]
    if (more := len(processes) - PROCESSES_SHOWN) > 0:
        parts.append(f"<p class='faint'>and {more:,} more</p>")
    if calls := overview_data.list_tool_calls(runs[0].table):
        parts += ["<h3>Tool calls</h3>", render_table(calls)]
    return "".join(parts)
