"""Timeline: a row per process, to zoom and pan; a click tells what happened there.

Reads   RunData
Gives   TimelineTab

The browser reports the visible part, and gets what draw_part chooses of it. While a gesture lasts,
only the newest part that was reported is drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html import escape
from typing import Any

import panel as pn
from bokeh.events import RangesUpdate, Tap
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from laminar.view.colours import VERSION_HUES, find_state_colour
from laminar.view.marks import Mark, make_mark, tell_story
from laminar.view.run_data import RunData
from laminar.view.timeline_data import Cells, Part, Timeline, draw_part, list_bars

ZOOM, ROWS_SHOWN = 8, 24  #: a click on cells shows an eighth of the time, and so many rows
CELLS = ("colour", "running", "version", "state", "x", "y", "dw", "dh")
ARCS = ("x0", "y0", "x1", "y1", "cx0", "cy0", "cx1", "cy1")
HINT = (
    "<p class='faint'>Drag to pan, scroll to zoom into the time, draw a box to zoom in. Click a "
    "bar to read what happened there.</p>"
)


class TimelineTab:
    """Picture of a run, with the story of what was clicked."""

    def __init__(self, run: RunData, show_moment: Callable[[int], None]) -> None:
        self._run, self._show_moment = run, show_moment
        self._revision, self._due = run.revision, False
        self._mark: Mark | None = None
        seconds, rows = _measure(run.timeline)
        self._part = Part(0.0, seconds, 0.0, rows)
        self._x, self._y = (
            Range1d(0, seconds, bounds=(0, seconds)),
            Range1d(rows, 0, bounds=(0, rows)),
        )
        self._bars, self._background = ColumnDataSource(list_bars()), ColumnDataSource(list_bars())
        self._cells = ColumnDataSource({name: [] for name in CELLS})
        self._publishes = ColumnDataSource({"x": [], "text": []})
        self._arcs = ColumnDataSource({name: [] for name in ARCS})
        self._at = Span(dimension="height", line_color="#111827", line_dash="dashed", visible=False)
        self._figure = self._make_figure()
        self._legend = pn.pane.HTML("", sizing_mode="stretch_width")
        self._story = pn.pane.HTML(HINT, sizing_mode="stretch_width")
        self._button = pn.widgets.Button(visible=False, button_type="primary")
        self._button.on_click(lambda _: self._mark and show_moment(self._mark.event))
        picture = pn.Column(
            self._legend,
            pn.pane.Bokeh(self._figure, sizing_mode="stretch_both"),
            sizing_mode="stretch_both",
        )
        side = pn.Column(
            self._button, self._story, width=400, sizing_mode="stretch_height", scroll=True
        )
        self.view = pn.Row(picture, side, sizing_mode="stretch_both")
        self._draw()

    def refresh(self) -> None:
        """Draw new events; a picture that ends at the newest event follows the run."""
        if self._revision == self._run.revision:
            return
        self._revision = self._run.revision
        before, (seconds, rows) = float(self._x.bounds[1]), _measure(self._run.timeline)
        self._x.bounds, self._y.bounds = (0, seconds), (0, rows)
        if self._part.x1 >= before * 0.995:
            whole = self._part.x0 <= before * 0.005
            begin = 0.0 if whole else self._part.x0 + seconds - before
            self._part = self._part._replace(x0=begin, x1=seconds)
            self._x.update(start=begin, end=seconds)
        self._draw()

    def mark_moment(self, seconds: float) -> None:
        """Draw a line at the moment that the slider shows."""
        self._at.update(location=seconds, visible=True)

    def _make_figure(self) -> Any:
        made = figure(
            x_range=self._x,
            y_range=self._y,
            tools="pan,xwheel_zoom,ywheel_zoom,box_zoom,reset,tap",
            active_scroll="xwheel_zoom",
            output_backend="webgl",
            sizing_mode="stretch_both",
            min_height=420,
        )
        made.toolbar.logo = made.outline_line_color = None
        made.xaxis.axis_label = "seconds since the first event"
        made.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
        made.xgrid.visible = False
        made.ygrid.update(level="overlay", grid_line_color="white", grid_line_width=3)
        made.yaxis.update(major_tick_line_color=None, axis_line_color=None)
        self._add_glyphs(made)
        made.add_layout(self._at)
        made.on_event(RangesUpdate, self._take_ranges)
        made.on_event(Tap, self._take_tap)
        return made

    def _add_glyphs(self, made: Any) -> None:
        image = made.image_rgba("colour", "x", "y", "dw", "dh", source=self._cells)
        quads = []
        for source, line in ((self._background, None), (self._bars, "white")):
            edges = {name: name for name in ("left", "right", "top", "bottom")}
            quads.append(
                made.quad(
                    **edges, fill_color="colour", line_color=line, line_width=0.5, source=source
                )
            )
            quads[-1].nonselection_glyph = None
            source.selected.on_change("indices", self._take_selection(source))
        made.vspan("x", source=self._publishes, line_color="#111827", line_alpha=0.35)
        made.text(
            "x", 0, "text", source=self._publishes, text_font_size="9px", x_offset=3, y_offset=10
        )
        made.bezier(*ARCS[:4], *ARCS[4:], source=self._arcs, line_color="#be123c", line_width=1.6)
        names = CustomJSHover(code=f"return {list(self._run.timeline.states)!r}[value] ?? '-'")
        made.add_tools(
            HoverTool(
                renderers=quads, tooltips="<b>@text</b> from @left{0,0.000} s to @right{0,0.000} s"
            ),
            HoverTool(
                renderers=[image],
                tooltips="<b>@state{custom}</b>, @running{0.0} at a time, version @version{0.0}",
                formatters={"@state": names},
            ),
        )

    def _draw(self) -> None:
        timeline = self._run.timeline
        drawn = draw_part(timeline, self._part, self._run.lanes)
        self._bars.data, self._background.data = drawn.bars, drawn.background
        self._cells.data = _list_cells(drawn.cells)
        self._publishes.data, self._arcs.data = drawn.publishes, drawn.arcs
        self._figure.ygrid[0].ticker = FixedTicker(ticks=drawn.lines)
        self._figure.yaxis[0].ticker = FixedTicker(ticks=[row + 0.5 for row in drawn.names])
        labels = {row + 0.5: name for row, name in drawn.names.items()}
        self._figure.yaxis[0].major_label_overrides = labels
        self._legend.object = _render_legend(timeline, drawn.cells is not None)

    def _take_ranges(self, event: Any) -> None:
        part = Part(event.x0, event.x1, *sorted((event.y0, event.y1)))
        if part != self._part:
            self._part = part
            if not self._due:
                self._due = True
                pn.state.execute(self._draw_newest, schedule=True)

    def _draw_newest(self) -> None:
        self._due = False
        self._draw()

    def _take_tap(self, event: Any) -> None:
        """Zoom into cells."""
        if self._cells.data["x"]:
            part, (seconds, rows) = self._part, _measure(self._run.timeline)
            width = (part.x1 - part.x0) / ZOOM
            begin = min(max(event.x - width / 2, 0.0), seconds - width)
            high = min(max(event.y + ROWS_SHOWN / 2, ROWS_SHOWN), rows)
            self._part = Part(begin, begin + width, max(high - ROWS_SHOWN, 0), high)
            self._x.update(start=begin, end=begin + width)
            self._y.update(start=high, end=self._part.y0)
            self._draw()

    def _take_selection(self, source: ColumnDataSource) -> Callable[[str, Any, Any], None]:
        def take(_: str, before: Any, indices: list[int]) -> None:
            over = source is self._background and self._bars.selected.indices
            if indices and not over:
                mark = make_mark(self._run.table, source.data["source"][indices[-1]])
                self._mark, self._button.visible = mark, mark.event > 0
                self._button.name = f"Open this moment (#{mark.event})"
                self._story.object = mark.text
                if mark.subject:
                    pn.state.execute(self._tell_story, schedule=True)

        return take

    async def _tell_story(self) -> None:
        mark = self._mark
        assert mark is not None
        self._story.object = f"{mark.text}<p class='faint'>Reading the log ...</p>"
        lines = await asyncio.to_thread(tell_story, self._run.directory, mark.subject)
        if mark is self._mark:
            self._story.object = f"{mark.text}<pre>{escape(chr(10).join(lines))}</pre>"


def _measure(timeline: Timeline) -> tuple[float, float]:
    """Return the seconds and the rows of the whole picture, which has some even without events."""
    return max(timeline.seconds, 1e-3), float(max(len(timeline.rows), 1))


def _list_cells(cells: Cells | None) -> dict[str, list[Any]]:
    if cells is None:
        return {name: [] for name in CELLS}
    part, arrays = cells.part, (cells.colour, cells.running, cells.version, cells.state)
    place = (part.x0, part.y0, part.x1 - part.x0, part.y1 - part.y0)
    return {name: [value] for name, value in zip(CELLS, (*arrays, *place), strict=True)}


def _render_legend(timeline: Timeline, is_cells: bool) -> str:
    parts = [
        f"<span class='key'><i style='background:{find_state_colour(name)}'></i> {name}</span>"
        for name in map(escape, timeline.states)
    ]
    hues = "".join(f"<i style='background:{hue}'></i>" for hue in VERSION_HUES)
    parts.append(f"<span class='key'>{hues} weight versions, in turn</span>")
    if is_cells:
        parts.append("<span class='key faint'>cells show means; click to zoom in</span>")
    return f"<div class='legend'>{''.join(parts)}</div>"
