"""Tabs of figures: the overview of all runs, and the health of one.

Reads   RunData
Gives   OverviewTab, HealthTab
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np
import panel as pn
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from laminar.view import overview_data
from laminar.view.colours import VERSION_HUES
from laminar.view.html import render_table
from laminar.view.overview_data import Curve
from laminar.view.run_data import RunData

PROCESSES_SHOWN = 200
GAUGE_POINTS = 400


class OverviewTab:
    """Sentence, warnings and curves of all runs."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._revisions: list[int] = []
        self._text = pn.pane.HTML("", sizing_mode="stretch_width")
        self._charts = _Charts(runs, lambda run: overview_data.list_curves(run.table))
        self.view = pn.Column(self._text, self._charts.view, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """Write everything again if a run has new events."""
        revisions = [run.revision for run in self._runs]
        if revisions != self._revisions:
            self._revisions = revisions
            self._text.object = "".join(_render_run(run, len(self._runs)) for run in self._runs)
            self._charts.refresh()


class HealthTab:
    """Processes, tool calls, mismatch and memory of one run."""

    def __init__(self, run: RunData) -> None:
        self._run, self._revision = run, 0
        self._tables = pn.pane.HTML("", sizing_mode="stretch_width")
        self._charts = _Charts([run], _list_health)
        self.view = pn.Column(self._charts.view, self._tables, sizing_mode="stretch_width")

    def refresh(self) -> None:
        if self._revision != self._run.revision:
            self._revision = self._run.revision
            self._charts.refresh()
            self._tables.object = _render_health(self._run)


def _list_health(run: RunData) -> list[Curve]:
    return [*overview_data.list_health_curves(run.table), _read_cache_use(run)]


def _read_cache_use(run: RunData) -> Curve:
    """Return the share of the replicas' caches that is in use, over the seconds."""
    gauges = run.table("gauges")
    capacity = gauges["kv_capacity"].to_numpy(zero_copy_only=False)
    known = np.flatnonzero(capacity > 0)
    times = gauges["reported"].to_numpy()[known]
    shares = gauges["kv_used"].to_numpy(zero_copy_only=False)[known] / capacity[known]
    edges = np.linspace(0, max(run.timeline.seconds, 1e-3), GAUGE_POINTS + 1)
    place = np.clip(np.searchsorted(edges, times) - 1, 0, GAUGE_POINTS - 1)
    count = np.bincount(place, minlength=GAUGE_POINTS)
    total = np.bincount(place, shares, GAUGE_POINTS)
    seen = np.flatnonzero(count)
    title = "KV cache in use, mean of the replicas, over the seconds"
    return Curve(title, edges[seen].tolist(), (total[seen] / count[seen]).tolist())


class _Charts:
    """Charts with a line per run."""

    def __init__(
        self, runs: Sequence[RunData], list_curves: Callable[[RunData], list[Curve]]
    ) -> None:
        self._runs, self._list_curves = runs, list_curves
        self._sources: list[list[ColumnDataSource]] = []
        self._panes: list[Any] = []
        for number, curve in enumerate(list_curves(runs[0])):
            self._panes.append(self._make_chart(number, curve.title))
        self.view = pn.GridBox(*self._panes, ncols=2, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """Send the curves again; hide charts without values."""
        for run_number, run in enumerate(self._runs):
            for number, curve in enumerate(self._list_curves(run)):
                source = self._sources[number][run_number]
                source.data = {"x": curve.steps, "y": curve.values}
        for pane, sources in zip(self._panes, self._sources, strict=True):
            pane.visible = any(len(source.data["x"]) for source in sources)

    def _make_chart(self, number: int, title: str) -> Any:
        made = figure(title=title, height=240, sizing_mode="stretch_width", tools="")
        made.toolbar_location = None
        made.outline_line_color = None
        made.xgrid.visible = False
        made.title.text_font_style = "normal"
        self._sources.append([])
        for place, run in enumerate(self._runs):
            source = ColumnDataSource({"x": [], "y": []})
            self._sources[number].append(source)
            colour = VERSION_HUES[(place * 5) % len(VERSION_HUES)]
            label = {"legend_label": run.name} if len(self._runs) > 1 else {}
            made.line(x="x", y="y", source=source, line_color=colour, line_width=2, **label)
            made.scatter(x="x", y="y", source=source, color=colour, size=4)
        made.add_tools(HoverTool(tooltips="@x: @y{0,0.[0000]}", mode="vline"))
        return pn.pane.Bokeh(made, sizing_mode="stretch_width")


def _render_run(run: RunData, runs: int) -> str:
    state = run.state
    text = overview_data.describe_run(run.table, state, run.timeline.seconds)
    name = f"<b>{escape(run.name)}</b> " if runs > 1 else ""
    problems = overview_data.list_problems(run.table, state)
    below = "".join(f"<div class='trouble'>{escape(problem)}</div>" for problem in problems)
    return f"<p class='lead'>{name}{escape(text)}</p>" + (
        below or "<div class='good'>No warnings.</div>"
    )


def _render_health(run: RunData) -> str:
    processes = overview_data.list_processes(run.table)
    more = len(processes) - PROCESSES_SHOWN
    parts = ["<h3>Processes</h3>", render_table(processes[:PROCESSES_SHOWN])]
    if more > 0:
        parts.append(f"<p class='faint'>and {more:,} more</p>")
    if calls := overview_data.list_tool_calls(run.table):
        parts += ["<h3>Tool calls</h3>", render_table(calls)]
    return "".join(parts)
