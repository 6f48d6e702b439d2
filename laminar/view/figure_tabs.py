"""Tabs of figures: the overview of all runs, and the health of one.

Reads   RunData
Gives   FigureTab; make_overview, make_health
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

import panel as pn

from laminar.analysis.report.charts import COLOURS, Chart, ChartLine, render_rows
from laminar.view import overview_data
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
        self._text = pn.pane.HTML("", sizing_mode="stretch_width")
        self._charts = pn.pane.HTML("", sizing_mode="stretch_width")
        parts = [self._text, self._charts] if text_first else [self._charts, self._text]
        self.view = pn.Column(*parts, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """Write everything again if a run has new events."""
        revisions = [run.revision for run in self._runs]
        if revisions != self._revisions:
            self._revisions = revisions
            self._text.object = self._render_text(self._runs)
            self._charts.object = "".join(render_rows(self._list_charts()))

    def _list_charts(self) -> Iterator[Chart]:
        """Yield the charts that have values."""
        found = [self._list_curves(run.table) for run in self._runs]
        for curves in zip(*found, strict=True):
            lines = [
                ChartLine(run.name, [x for x, _ in curve.points], [y for _, y in curve.points])
                for run, curve in zip(self._runs, curves, strict=True)
            ]
            if any(line.x for line in lines):
                yield Chart(curves[0].title, curves[0].x_label, "", lines)


def make_overview(runs: Sequence[RunData]) -> FigureTab:
    return FigureTab(runs, overview_data.list_curves, _render_runs, text_first=True)


def make_health(run: RunData) -> FigureTab:
    return FigureTab([run], overview_data.list_health_curves, _render_health, text_first=False)


def _render_runs(runs: Sequence[RunData]) -> str:
    """Return a sentence about each run, and its problems."""
    parts = []
    for place, run in enumerate(runs):
        text = overview_data.describe_run(run.table, run.state, run.timeline.seconds)
        name = (
            f"<b style='color:{COLOURS[place % len(COLOURS)]}'>{escape(run.name)}</b> "
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
