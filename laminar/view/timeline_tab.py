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

from laminar.view.colours import STATE_COLOURS, VERSION_HUES
from laminar.view.marks import Mark, describe_bars, find_mark, tell_story
from laminar.view.run_data import RunData
from laminar.view.timeline_data import (
    Cells,
    Drawing,
    Part,
    Timeline,
    draw_part,
    empty_bars,
    empty_cells,
)

ZOOM = 8  #: a click on cells shows an eighth of the time
ROWS_SHOWN = 24  #: around the clicked cell
HINT = (
    "<p class='faint'>Drag to pan, scroll to zoom the time, draw a box to zoom in. "
    "Click a bar to read what happened there.</p>"
)


class TimelineTab:
    """Picture of a run, with the story of what was clicked."""

    def __init__(self, run: RunData, show_moment: Callable[[int], None]) -> None:
        self._run, self._show_moment = run, show_moment
        self._revision, self._drawn = run.revision, False
        seconds, rows = max(run.timeline.seconds, 1e-3), max(len(run.timeline.rows), 1)
        self._part = Part(0.0, seconds, 0.0, float(rows))
        self._x = Range1d(0.0, seconds, bounds=(0.0, seconds))
        self._y = Range1d(rows, 0, bounds=(0, rows))
        self._bars = ColumnDataSource({**empty_bars(), "title": [], "more": []})
        self._background = ColumnDataSource({**empty_bars(), "title": [], "more": []})
        self._cells = ColumnDataSource(_list_cells(empty_cells()))
        self._publishes = ColumnDataSource({"x": [], "text": []})
        self._arcs = ColumnDataSource({n: [] for n in ARC_COLUMNS})
        self._at = Span(dimension="height", line_color="#111827", line_dash="dashed", visible=False)
        self._figure = self._make_figure()
        self._legend = pn.pane.HTML("", sizing_mode="stretch_width")
        self._story = pn.pane.HTML(HINT, sizing_mode="stretch_both")
        self._button = pn.widgets.Button(name="Open this moment", visible=False)
        self._button.on_click(self._open_moment)
        self._mark: Mark | None = None
        side = pn.Column(
            self._button, self._story, width=400, sizing_mode="stretch_height", scroll=True
        )
        picture = pn.Column(self._legend, pn.pane.Bokeh(self._figure, sizing_mode="stretch_both"))
        picture.sizing_mode = "stretch_both"
        self.view = pn.Row(picture, side, sizing_mode="stretch_both", css_classes=["timeline"])
        self._draw()

    def refresh(self) -> None:
        """Draw new events; a picture that ends at the newest event follows the run."""
        if self._revision == self._run.revision:
            return
        self._revision = self._run.revision
        timeline, before = self._run.timeline, float(self._x.bounds[1])
        seconds, rows = max(timeline.seconds, 1e-3), max(len(timeline.rows), 1)
        self._x.bounds, self._y.bounds = (0.0, seconds), (0, rows)
        part = self._part
        if part.x1 >= before * 0.995:
            begin = 0.0 if part.x0 <= before * 0.005 else part.x0 + seconds - before
            self._x.update(start=begin, end=seconds)
            self._part = part._replace(x0=begin, x1=seconds)
        self._draw()

    def mark_moment(self, seconds: float) -> None:
        """Draw a line at the moment that the slider shows."""
        self._at.update(location=seconds, visible=True)

    def _make_figure(self) -> Any:
        made = figure(
            x_range=self._x,
            y_range=self._y,
            tools="pan,xwheel_zoom,ywheel_zoom,box_zoom,reset,tap",
            active_drag="pan",
            active_scroll="xwheel_zoom",
            output_backend="webgl",
            sizing_mode="stretch_both",
            min_height=420,
            toolbar_location="above",
        )
        made.toolbar.logo = None
        made.xaxis.axis_label = "seconds since the first event"
        made.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
        made.xgrid.visible = False
        made.ygrid.update(level="overlay", grid_line_color="white", grid_line_width=3)
        made.yaxis.update(major_tick_line_color=None, axis_line_color=None)
        made.outline_line_color = None
        self._ticker = made.yaxis[0].ticker = FixedTicker(ticks=[])
        self._add_glyphs(made)
        made.add_layout(self._at)
        made.on_event(RangesUpdate, self._take_ranges)
        made.on_event(Tap, self._take_tap)
        return made

    def _add_glyphs(self, made: Any) -> None:
        image = made.image_rgba(image="colour", x="x", y="y", dw="dw", dh="dh", source=self._cells)
        edges = {"left": "left", "right": "right", "top": "top", "bottom": "bottom"}
        back = made.quad(**edges, fill_color="colour", line_color=None, source=self._background)
        bars = made.quad(
            **edges, fill_color="colour", line_color="white", line_width=0.5, source=self._bars
        )
        for quads in (back, bars):
            quads.nonselection_glyph = None
            quads.hover_glyph = None
        made.vspan(
            x="x", source=self._publishes, line_color="#111827", line_alpha=0.35, line_width=1
        )
        made.text(
            x="x", y=0, text="text", source=self._publishes, text_font_size="9px",
            text_color="#374151", x_offset=3, y_offset=10,
        )  # fmt: skip
        made.bezier(
            **{name: name for name in ARC_COLUMNS if name != "source"},
            source=self._arcs, line_color="#be123c", line_width=1.6, line_alpha=0.85,
        )  # fmt: skip
        made.add_tools(
            HoverTool(renderers=[back, bars], tooltips="<b>@title</b><br>@more"),
            HoverTool(
                renderers=[image],
                tooltips="<b>@state{custom}</b><br>@running{0.0} at a time, version @version{0.0}",
                formatters={"@state": CustomJSHover(code=_name_states(self._run.timeline))},
            ),
        )

    def _draw(self) -> None:
        run = self._run
        drawn = draw_part(run.timeline, self._part, run.lanes)
        for source, bars in ((self._bars, drawn.bars), (self._background, drawn.background)):
            source.data = {**bars, **describe_bars(run.table, bars)}
        if drawn.cells is not None or len(self._cells.data["x"]):
            self._cells.data = _list_cells(drawn.cells or empty_cells())
        self._publishes.data, self._arcs.data = drawn.publishes, drawn.arcs
        self._ticker.ticks = [row + 0.5 for row in drawn.ticks]
        self._figure.ygrid[0].ticker = FixedTicker(ticks=drawn.lines)
        self._figure.yaxis.major_label_overrides = {
            row + 0.5: name for row, name in drawn.ticks.items()
        }
        self._legend.object = _render_legend(run.timeline, drawn)

    def _take_ranges(self, event: Any) -> None:
        y0, y1 = sorted((event.y0, event.y1))
        part = Part(event.x0, event.x1, y0, y1)
        if part != self._part:
            self._part = part
            if not self._drawn:
                self._drawn = True
                pn.state.execute(self._draw_newest, schedule=True)

    def _draw_newest(self) -> None:
        self._drawn = False
        self._draw()

    def _take_tap(self, event: Any) -> None:
        if len(self._cells.data["x"]):
            self._zoom_in(event.x, event.y)
            return
        mark = find_mark(self._run, event.x, event.y, self._part)
        if mark is not None:
            self._mark = mark
            self._button.name = f"Open this moment (#{mark.event})"
            self._button.visible = mark.event > 0
            self._story.object = f"{mark.text}<p class='faint'>Reading the log ...</p>"
            pn.state.execute(self._tell_story, schedule=True)

    def _zoom_in(self, x: float, y: float) -> None:
        part, rows = self._part, len(self._run.timeline.rows)
        width = (part.x1 - part.x0) / ZOOM
        begin = min(max(x - width / 2, 0.0), max(self._run.timeline.seconds - width, 0.0))
        high = min(max(y + ROWS_SHOWN / 2, ROWS_SHOWN), rows)
        low = max(high - ROWS_SHOWN, 0)
        self._part = Part(begin, begin + width, low, high)
        self._x.update(start=begin, end=begin + width)
        self._y.update(start=high, end=low)
        self._draw()

    async def _tell_story(self) -> None:
        mark = self._mark
        assert mark is not None
        lines = await asyncio.to_thread(tell_story, self._run, mark)
        if mark is self._mark:
            story = "\n".join(escape(line) for line in lines)
            self._story.object = f"{mark.text}<pre class='story'>{story}</pre>"

    def _open_moment(self, _: Any) -> None:
        if self._mark is not None:
            self._show_moment(self._mark.event)


ARC_COLUMNS = ("x0", "y0", "x1", "y1", "cx0", "cy0", "cx1", "cy1", "source")


def _list_cells(cells: Cells) -> dict[str, list[Any]]:
    part, none = cells.part, cells.colour.size == 0
    found: dict[str, list[Any]] = {
        "colour": [cells.colour], "running": [cells.running], "version": [cells.version],
        "state": [cells.state], "x": [part.x0], "y": [part.y0],
        "dw": [part.x1 - part.x0], "dh": [part.y1 - part.y0],
    }  # fmt: skip
    return {name: [] if none else values for name, values in found.items()}


def _name_states(timeline: Timeline) -> str:
    names = list(timeline.states)
    return f"const n = {names!r}; return value >= 0 ? n[value] : 'nothing known'"


def _render_legend(timeline: Timeline, drawn: Drawing) -> str:
    parts = [
        f"<span class='key'><i style='background:{STATE_COLOURS.get(name, STATE_COLOURS[''])}'>"
        f"</i>{escape(name)}</span>"
        for name in timeline.states
    ]
    hues = "".join(f"<i style='background:{hue}'></i>" for hue in VERSION_HUES)
    parts.append(f"<span class='key versions'>{hues}weight versions, in turn</span>")
    if drawn.cells is not None:
        parts.append(
            "<span class='key faint'>too many bars: cells show means, click to zoom in</span>"
        )
    return f"<div class='legend'>{''.join(parts)}</div>"
