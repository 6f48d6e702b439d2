"""Time slider: the state after any event, and why the coordinator decided what it did then.

Reads   RunData
Gives   MomentTab

The address of the page names the event (`?event=123456`), so that a moment can be shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import pandas as pd
import panel as pn

from laminar.config import ConfigError
from laminar.view import moment_data
from laminar.view.html import render_table, render_tiles
from laminar.view.run_data import Moment, RunData

STEPS = {"-100": -100, "-1": -1, "+1": 1, "+100": 100, "newest": 1 << 60}


class MomentTab:
    """Slider over the events, with the state after the chosen one."""

    def __init__(self, run: RunData, event: int, tell: Callable[[int], None]) -> None:
        self._run, self._tell = run, tell
        self._wanted = self._shown = 0
        wide = {"sizing_mode": "stretch_width"}
        first, last = run.first_event, max(run.last_event, run.first_event + 1)
        event = min(max(event or last, first), last)
        self._slider = pn.widgets.IntSlider(
            name="event", start=first, end=last, value=event, **wide
        )
        self._number = pn.widgets.IntInput(value=event, start=first, end=last, width=110)
        self._slider.param.watch(lambda change: self.show(change.new), "value_throttled")
        self._number.param.watch(lambda change: self.show(change.new), "value")
        buttons = [pn.widgets.Button(name=name, width=64) for name in STEPS]
        for button in buttons:
            button.on_click(lambda _, step=STEPS[button.name]: self.show(self._wanted + step))
        self._head, self._decided = pn.pane.HTML("", **wide), pn.pane.HTML("", **wide)
        self._waits = _make_table(moment_data.WAITS)
        self._replicas = _make_table(moment_data.REPLICAS)
        self.view = pn.Column(
            pn.Row(self._slider, self._number, *buttons, **wide),
            self._head,
            pn.Column(self._decided, max_height=230, scroll=True, **wide),
            "### Who waits for whom",
            self._waits,
            "### Replicas",
            self._replicas,
            **wide,
        )

    def show(self, event: int) -> None:
        """Move to an event, or to the nearest one of the log."""
        self._wanted = min(max(event, self._slider.start), self._slider.end)
        self._slider.value = self._wanted
        pn.state.execute(self._load, schedule=True)

    def refresh(self) -> None:
        """Lengthen the slider of a live run; the moment stays, so that it can be read."""
        self._slider.end = self._number.end = max(self._run.last_event, self._slider.end)
        if not self._wanted:
            self.show(self._slider.value)

    async def _load(self) -> None:
        """Show the newest event asked for; those that were passed meanwhile are skipped."""
        event = self._wanted
        if event == self._shown:
            return
        self._shown = event
        try:
            moment = await asyncio.to_thread(self._run.get_moment, event)
        except ConfigError as error:
            self._head.object = f"<p class='trouble'>{escape(str(error))}</p>"
            return
        if event == self._wanted:
            self._draw(event, moment)

    def _draw(self, event: int, moment: Moment) -> None:
        tables = self._run.table
        self._number.value = event
        name, fields = moment_data.describe_event(moment)
        self._head.object = (
            f"<div class='event'><span class='faint'>#{event} at {moment.seconds:,.3f} s</span>"
            f"<b>{escape(name)}</b><code>{escape(fields)}</code></div>"
            f"{render_tiles(moment_data.list_tiles(moment.state))}"
        )
        reasons = "".join(
            f"<p class='why'><b>{escape(reason.subject)}</b>: {escape(reason.text)}</p>"
            for reason in moment_data.list_reasons(tables, event)
        )
        commands = render_table(moment_data.list_decisions(moment))
        nothing = "<p class='faint'>This event caused no command.</p>"
        self._decided.object = reasons + (commands or nothing)
        self._waits.value = _make_frame(moment_data.WAITS, moment_data.list_waiting(moment))
        replicas = moment_data.list_replicas(moment.state, tables)
        self._replicas.value = _make_frame(moment_data.REPLICAS, replicas)
        self._tell(event)


def _make_frame(columns: Sequence[str], rows: Sequence[Any] = ()) -> Any:
    return pd.DataFrame(list(rows), columns=list(columns))


def _make_table(columns: Sequence[str]) -> Any:
    """Return a table of which the browser gets the visible page only."""
    return pn.widgets.Tabulator(
        _make_frame(columns), pagination="remote", page_size=12, show_index=False, disabled=True,
        theme="simple", layout="fit_data_stretch", sizing_mode="stretch_width",
    )  # fmt: skip
