"""Page of `laminar view`: its header, its tabs, and the refresh of a live run.

Reads   RunData
Gives   make_page, a Panel object for one browser tab or notebook cell
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from html import escape
from typing import Any

import panel as pn
from panel.io.resources import LOCAL_DIST

from laminar.view.figure_tabs import make_health, make_overview
from laminar.view.html import STYLE
from laminar.view.moment_tab import MomentTab
from laminar.view.run_data import REFRESH_S, RunData
from laminar.view.samples_tab import SamplesTab
from laminar.view.timeline_tab import TimelineTab

TABS = ("Timeline", "Time slider", "Overview", "Samples", "Health")
SLIDER = TABS.index("Time slider")


def make_page(runs: Sequence[RunData]) -> Any:
    """Build a page, which shows one of the runs at a time, and all in its overview."""
    document = pn.state.curdoc
    # A notebook has no server of ours: its output carries the scripts, so that no CDN is needed.
    pn.extension("tabulator", raw_css=[STYLE], inline=document is None)
    if document is not None:
        # Panel sets it only for a document that a GET has made, not for a reconnected websocket.
        document.template_variables["dist_url"] = LOCAL_DIST
    pn.pane.HTML.stylesheets = [STYLE]
    return _Page(runs).view


class _Page:
    """Page in one browser tab."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._head = pn.pane.HTML("", sizing_mode="stretch_width")
        choice = pn.widgets.Select(options={run.name: run for run in runs}, visible=len(runs) > 1)
        choice.param.watch(lambda change: self._show_run(change.new), "value")
        self._tabs = pn.Tabs(dynamic=True, sizing_mode="stretch_both")
        self._tabs.param.watch(lambda _: self._refresh_tab(), "active")
        head = pn.Row(self._head, choice, sizing_mode="stretch_width")
        self.view = pn.Column(head, self._tabs, sizing_mode="stretch_both")
        asked = pn.state.session_args.get("event", [b""])[0].decode("ascii", "ignore")
        event = int(asked) if asked.isdecimal() else 0
        self._show_run(runs[0], event)
        self._tabs.active = SLIDER if event else 0
        pn.state.add_periodic_callback(self._refresh, int(REFRESH_S * 1000))

    def _show_run(self, run: RunData, event: int = 0) -> None:
        self._run = run
        self._timeline = TimelineTab(run, self._open_moment)
        self._moment = MomentTab(run, event, self._tell_event)
        figures, samples = make_overview(self._runs), SamplesTab(run)
        self._parts: list[Any] = [
            self._timeline, self._moment, figures, samples, make_health(run)
        ]  # fmt: skip
        active = self._tabs.active
        self._tabs[:] = [(n, part.view) for n, part in zip(TABS, self._parts, strict=True)]
        self._tabs.active = active
        self._write_head()
        self._refresh_tab()

    async def _refresh(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(run.refresh) for run in self._runs))
        self._write_head()
        self._refresh_tab()

    def _refresh_tab(self) -> None:
        self._parts[self._tabs.active].refresh()

    def _write_head(self) -> None:
        ages = [f"{run.name}: {run.describe_age()}" for run in self._runs]
        age = " · ".join(ages) if ages[1:] else self._run.describe_age()
        name = escape(self._run.name)
        self._head.object = f"<h1>{name}</h1><span class='age'>{escape(age)}</span>"

    def _open_moment(self, event: int) -> None:
        self._tabs.active = SLIDER
        self._moment.show(event)

    def _tell_event(self, event: int) -> None:
        """Write the event into the address, and mark it in the timeline."""
        self._timeline.mark_moment(self._run.find_time(event))
        if pn.state.location is not None:
            pn.state.location.update_query(event=event)
