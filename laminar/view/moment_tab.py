"""Time slider: the state after any event, and why the coordinator decided what it did then.

Reads   RunData
Gives   MomentTab

The address of the page names the event (`?event=123456`), so that a moment can be shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

import pandas as pd
import panel as pn

from laminar.config import ConfigError
from laminar.view import moment_data
from laminar.view.html import render_table, render_tiles
from laminar.view.run_data import Moment, RunData

PAGE_ROWS = 16


class MomentTab:
    """Slider over the events, with the state after the chosen one."""

    def __init__(self, run: RunData, event: int, tell: Callable[[int], None]) -> None:
        self._run, self._tell = run, tell
        last = max(run.last_event, 1)
        self._slider = pn.widgets.IntSlider(
            name="event",
            start=run.first_event,
            end=max(last, run.first_event + 1),
            value=event or last,
            sizing_mode="stretch_width",
        )
        self._number = pn.widgets.IntInput(
            value=self._slider.value, start=run.first_event, end=last, width=110
        )
        self._buttons = [
            pn.widgets.Button(name=name, width=70) for name in ("-100", "-1", "+1", "+100")
        ]
        self._title = pn.pane.HTML("", sizing_mode="stretch_width")
        self._tiles = pn.pane.HTML("", sizing_mode="stretch_width")
        self._decided = pn.pane.HTML("", sizing_mode="stretch_width")
        self._replicas = _make_table(["replica", "version", "running", "slots", "waiting",
                                      "KV in use", "doing"])  # fmt: skip
        self._waits = _make_table(list(moment_data.WAITS))
        self._wanted = self._shown = 0
        self._link()
        self.view = pn.Column(
            pn.Row(self._slider, self._number, *self._buttons, sizing_mode="stretch_width"),
            self._title,
            self._tiles,
            pn.Row(
                pn.Column("### Decided then", self._decided, sizing_mode="stretch_width"),
                pn.Column("### Who waits for whom", self._waits, sizing_mode="stretch_width"),
                sizing_mode="stretch_width",
            ),
            "### Replicas",
            self._replicas,
            sizing_mode="stretch_width",
        )

    @property
    def event(self) -> int:
        return int(self._slider.value)

    def show(self, event: int) -> None:
        """Move to an event."""
        self._slider.value = min(max(event, self._slider.start), self._slider.end)
        self._go(self._slider.value)

    def refresh(self) -> None:
        """Lengthen the slider; one at its end stays where it is, so that a moment can be read."""
        last = max(self._run.last_event, 2)
        if last != self._slider.end:
            self._slider.end = self._number.end = last
        if not self._shown:
            self._go(self.event)

    def _link(self) -> None:
        self._slider.param.watch(lambda change: self._go(change.new), "value_throttled")
        self._number.param.watch(lambda change: self.show(change.new), "value")
        for button in self._buttons:
            button.on_click(lambda _, step=int(button.name): self.show(self.event + step))

    def _go(self, event: int) -> None:
        if event != self._wanted:
            self._wanted = event
            pn.state.execute(self._load, schedule=True)

    async def _load(self) -> None:
        """Show the newest event asked for; those that were passed meanwhile are skipped."""
        event = self._wanted
        if event == self._shown:
            return
        self._shown = event
        try:
            moment = await asyncio.to_thread(self._run.get_moment, event)
        except ConfigError as error:
            self._title.object = f"<p class='trouble'>{escape(str(error))}</p>"
            return
        if event == self._wanted:
            self._draw(event, moment)

    def _draw(self, event: int, moment: Moment) -> None:
        tables = self._run.table
        self._number.value = event
        name, fields = moment_data.describe_event(moment)
        self._title.object = (
            f"<div class='event'><span class='faint'>#{event:,} at {moment.seconds:.3f} s</span> "
            f"<b>{escape(name)}</b> <code>{escape(fields)}</code></div>"
        )
        self._tiles.object = render_tiles(moment_data.list_tiles(moment.state))
        self._decided.object = _render_decisions(moment, moment_data.list_reasons(tables, event))
        self._replicas.value = pd.DataFrame(
            moment_data.list_replicas(moment.state, tables), columns=self._replicas.value.columns
        )
        self._waits.value = pd.DataFrame(
            moment_data.list_waiting(moment), columns=self._waits.value.columns
        )
        self._tell(event)


def _render_decisions(moment: Moment, reasons: Iterable[moment_data.Reason]) -> str:
    found = "".join(
        f"<p class='why'><b>{escape(reason.subject)}</b>: {escape(reason.text)}</p>"
        for reason in reasons
    )
    decisions = moment_data.list_decisions(moment)
    if not decisions:
        return found + "<p class='faint'>This event caused no command.</p>"
    return found + render_table(decisions)


def _make_table(columns: list[str]) -> Any:
    return pn.widgets.Tabulator(
        pd.DataFrame(columns=columns),
        pagination="remote",
        page_size=PAGE_ROWS,
        show_index=False,
        disabled=True,
        selectable=False,
        theme="simple",
        layout="fit_data_stretch",
        sizing_mode="stretch_width",
    )
