"""Charts as inline SVG: lines with error bars or bands, bars of figures, bars of shares.

Reads   numbers, the width of a chart on its page
Gives   self-contained SVG text: no script, no font, no link; render_rows, the charts of a part of a
        page: three in a row, and no row that is half empty

A chart has a title, its axes have a unit, and every point shows its values on mouse hover
(`<title>`). More points than can be distinguished are drawn as the means of neighbours. Lines with
the same points are merged into one that has the names of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise

COLOURS = (
    "#1f5fa8", "#c4501b", "#23804a", "#7d3fb0", "#a67a00", "#b8336a", "#1b8a8f", "#5c5c5c",
)  # fmt: skip
"""Colours of lines; each has a contrast of at least 3 to white."""
POINTS_MAX = 400

PAGE_WIDTH, GAP, IN_A_ROW = 1320, 28, 3
WIDTH, HEIGHT = 421, 260  #: of a chart in a row of three
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 40, 42
LEGEND_HEIGHT = 17  #: of each row after the first, for which there is room
BAR_HEIGHT, BAR_LEFT, BARS_TOP = 26, 104, 26
STYLE = (
    "svg{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}text{fill:#1c1c1c}"
    ".title{font-size:13.5px;font-weight:600}.label{fill:#555}.faint{fill:#666}"
    ".grid{stroke:#e6e8eb}.axis{stroke:#59636e}"
)
"""Style of the parts of a chart, on a page or in a file."""

Drawn = Callable[[float], str]
"""Chart that is drawn for a given width, so that letters have one size in every row."""


def render_rows(charts: Iterable[Drawn]) -> Iterator[str]:
    """Yield rows of charts; a short last row takes a chart from the row before or is stretched."""
    left = list(charts)
    for count in _count_columns(len(left)):
        width = (PAGE_WIDTH - GAP * (count - 1)) / count
        parts = "".join(f"<div>{chart(width)}</div>" for chart in left[:count])
        yield f'<div class="row">{parts}</div>'
        left = left[count:]


def _count_columns(number: int) -> list[int]:
    full, rest = divmod(number, IN_A_ROW)
    if rest == 1 and full:
        return [IN_A_ROW] * (full - 1) + [2, 2]
    return [IN_A_ROW] * full + ([rest] if rest else [])


@dataclass(frozen=True)
class ChartLine:
    """Points in order of x; y is None where a point has no value."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    error: Sequence[float] = ()  #: half the length of the error bar at each point
    dashed: bool = False
    colour: int = -1  #: index into COLOURS; -1: by position in the chart
    marks: bool = False  #: mark each point, for lines of few points
    band: Sequence[tuple[float, float]] = ()  #: lowest and highest value at each point
    stairs: bool = False  #: a level around each x, as in a histogram


@dataclass(frozen=True)
class Chart:
    """Lines to draw, with the units of both axes; a call draws them for a width."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    y_range: tuple[float, float] | None = None  #: None: the range of the values
    x_range: tuple[float, float] | None = None

    def __call__(self, width: float) -> str:
        return draw_chart(self, width)


@dataclass
class _Scale:
    """Scale of one axis, from values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def draw_chart(chart: Chart, width: float = WIDTH) -> str:
    """Draw a chart; without points, it says so."""
    coloured = [(_pick_colour(line, i), line) for i, line in enumerate(chart.lines)]
    lines = [(colour, _thin_line(line)) for colour, line in _merge_equal_lines(coloured)]
    points = [p for _, line in lines for p in _list_points(line)]
    if not points:
        faint = _draw_text(width / 2, HEIGHT / 2, "no figures yet", kind="faint")
        return _build_svg(chart.title, width, HEIGHT, [faint])
    x, y = _build_scales(chart, [*points, *_band_ends(chart.lines)], width)
    plot = [*_draw_axes(chart, x, y)]
    for colour, line in lines:
        plot += _draw_line(line, colour, x, y)
    rows = _split_legend(
        [(colour, line) for colour, line in lines if any(_list_points(line))], width
    )
    lower = LEGEND_HEIGHT * max(len(rows) - 1, 0)
    body = [f'<g transform="translate(0 {lower})">', *plot, "</g>", *_draw_legend(rows, width)]
    return _build_svg(chart.title, width, HEIGHT + lower, body)


def _build_svg(title: str, width: float, height: float, body: Iterable[str]) -> str:
    head = f'<text x="0" y="14" class="title">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{head}{''.join(body)}</svg>"
    )


def _merge_equal_lines(lines: Iterable[tuple[str, ChartLine]]) -> list[tuple[str, ChartLine]]:
    """Merge lines that would cover each other exactly."""
    found: dict[object, tuple[str, ChartLine]] = {}
    for colour, line in lines:
        values = (*line.x,), (*line.y,), (*line.error,), (*line.band,)
        key = values if len(line.x) else line.name
        if key in found:
            before, same = found[key]
            found[key] = before, replace(same, name=f"{same.name} = {line.name}")
        else:
            found[key] = colour, line
    return list(found.values())


def _band_ends(lines: Iterable[ChartLine]) -> Iterator[tuple[float, float, float]]:
    """Yield the ends of the bands, as points without an error."""
    for line in lines:
        for x, ends in zip(line.x, line.band, strict=bool(line.band)):
            yield from ((x, end, 0.0) for end in ends)


def _pick_colour(line: ChartLine, place: int) -> str:
    return COLOURS[(line.colour if line.colour >= 0 else place) % len(COLOURS)]


def _thin_line(line: ChartLine) -> ChartLine:
    """Replace neighbouring points by their means, so that at most POINTS_MAX remain."""
    per = -(-len(line.x) // POINTS_MAX)
    if per < 2:
        return line
    parts = [slice(i, i + per) for i in range(0, len(line.x), per)]
    ys = [[v for v in line.y[part] if v is not None] for part in parts]
    xs = [_mean(line.x[part]) for part in parts]
    means = [_mean(values) if values else None for values in ys]
    return replace(line, x=xs, y=means, error=(), marks=False, band=())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _list_points(line: ChartLine) -> Iterator[tuple[float, float, float]]:
    """Yield (x, y, half of the error bar) of every point that has a finite value."""
    errors = line.error or [0.0] * len(line.x)
    for x, y, error in zip(line.x, line.y, errors, strict=True):
        if y is not None and math.isfinite(y):
            yield x, y, error


def _build_scales(
    chart: Chart, points: Sequence[tuple[float, float, float]], width: float
) -> tuple[_Scale, _Scale]:
    xs = chart.x_range or (min(p[0] for p in points), max(p[0] for p in points))
    ys = chart.y_range or value_range(points)
    x = _Scale(*_widen_range(*xs), LEFT, width - RIGHT)
    y = _Scale(*_widen_range(*ys), HEIGHT - BOTTOM, TOP)
    x.ticks, y.ticks = (
        choose_ticks(x.low, x.high, max(int(width / 75), 4)),
        choose_ticks(y.low, y.high, 5),
    )
    if chart.y_range is None:  # end at a tick, so that the highest value has a label above it
        step = y.ticks[1] - y.ticks[0]
        y.low, y.high = math.floor(y.low / step) * step, math.ceil(y.high / step) * step
        y.ticks = choose_ticks(y.low, y.high, 5)
    return x, y


def value_range(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the lowest and the highest value, error bars included; start at 0 if 0 is near."""
    listed = list(points)
    low, high = min(y - e for _, y, e in listed), max(y + e for _, y, e in listed)
    if -high / 50 <= low <= high / 2:  # also values that rounding put just below 0
        low = 0.0
    elif low / 2 <= high < 0:
        high = 0.0
    return low, high


def _widen_range(low: float, high: float) -> tuple[float, float]:
    """Widen the range of a single value."""
    if high > low:
        return low, high
    around = abs(low) / 2 or 0.5
    return (low - around, high + around) if low else (0.0, 1.0)


def choose_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count`, and at least two, round numbers from `low` to `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = max(math.floor(high / step + 1e-9), first + 1)
    return [i * step for i in range(first, last + 1)]


def format_number(value: float) -> str:
    """Format a number briefly, as an axis label."""
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _draw_axes(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    """Yield the tick labels of both axes, the grid lines of y, and the axis labels with units."""
    for value in y.ticks:
        if y.low - 1e-9 <= value <= y.high * (1 + 1e-9) + 1e-12:
            yield _draw_rule(y(value), "grid", x)
            yield _draw_text(LEFT - 7, y(value) + 4, format_number(value), anchor="end")
    for value in x.ticks:
        if x.low <= value <= x.high:
            yield _draw_text(x(value), HEIGHT - BOTTOM + 17, format_number(value))
    yield _draw_rule(HEIGHT - BOTTOM, "axis", x)
    yield _draw_text((x.begin + x.end) / 2, HEIGHT - 8, chart.x_label, kind="label")
    height = (TOP + HEIGHT - BOTTOM) / 2
    turned = f' transform="rotate(-90 12 {height})"'
    yield _draw_text(12, height, chart.y_label, kind="label", more=turned)


def _draw_rule(y: float, kind: str, x: _Scale) -> str:
    return f'<line x1="{x.begin}" x2="{x.end:g}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'


def _draw_text(
    x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "", more: str = ""
) -> str:
    name = f' class="{kind}"' if kind else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}{name}{more}>{escape(text)}</text>"


def _draw_line(line: ChartLine, colour: str, x: _Scale, y: _Scale) -> Iterator[str]:
    points = list(_list_points(line))
    places = [(x(px), y(py)) for px, py, _ in points]
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    shape = _build_stairs(places, y(max(y.low, 0.0))) if line.stairs else places
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in shape)
    fill = colour if line.stairs else "none"
    if line.band:
        ends = [(x(at), y(low), y(high)) for at, (low, high) in zip(line.x, line.band, strict=True)]
        around = [(at, high) for at, _, high in ends] + [(at, low) for at, low, _ in ends[::-1]]
        edge = " ".join(f"{px:.1f},{py:.1f}" for px, py in around)
        yield f'<polygon points="{edge}" fill="{colour}" fill-opacity="0.15"/>'
    yield (
        f'<polyline points="{path}" fill="{fill}" fill-opacity="0.12" stroke="{colour}" '
        f'stroke-width="1.7" stroke-linejoin="round"{dash}/>'
    )
    shown = (line.marks or len(points) < 4) and not line.stairs
    bands = dict(zip(line.x, line.band, strict=True)) if line.band else {}
    for (px, py), (value_x, value_y, error) in zip(places, points, strict=True):
        if error:
            yield _error_bar(px, y(value_y - error), y(value_y + error), colour)
        tooltip = f"{line.name}: {format_number(value_y)}" + (
            f" ± {format_number(error)}" if error else ""
        )
        if line.band:
            tooltip += f" ({' to '.join(format_number(end) for end in bands[value_x])})"
        fill = colour if shown else "transparent"
        yield (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{3.2 if shown else 5}" fill="{fill}">'
            f"<title>{escape(tooltip)} (at {format_number(value_x)})</title></circle>"
        )


def _build_stairs(
    places: Sequence[tuple[float, float]], ground: float
) -> list[tuple[float, float]]:
    """Return a step outline: a level around each place, half way to its neighbours."""
    xs = [px for px, _ in places]
    half = (xs[1] - xs[0]) / 2 if len(xs) > 1 else 4.0
    edges = [xs[0] - half, *((a + b) / 2 for a, b in pairwise(xs)), xs[-1] + half]
    levels = [
        point for i, (_, py) in enumerate(places) for point in ((edges[i], py), (edges[i + 1], py))
    ]
    return [(edges[0], ground), *levels, (edges[-1], ground)]


def _error_bar(x: float, low: float, high: float, colour: str) -> str:
    ends = "".join(f"M{x - 4:.1f} {end:.1f}h8" for end in (low, high))
    return f'<path d="M{x:.1f} {low:.1f}V{high:.1f}{ends}" stroke="{colour}" fill="none"/>'


def _split_legend(
    lines: Sequence[tuple[str, ChartLine]], width: float
) -> list[list[tuple[str, ChartLine]]]:
    """Split a legend into rows that fit the width; a single line needs no legend."""
    rows: list[list[tuple[str, ChartLine]]] = []
    left = 0.0
    for colour, line in lines if len(lines) > 1 else ():
        if not rows or _entry_width(line) > left:
            rows.append([])
            left = width - RIGHT
        rows[-1].append((colour, line))
        left -= _entry_width(line)
    return rows


def _entry_width(line: ChartLine) -> float:
    return 6.6 * len(line.name) + 36


def _draw_legend(rows: Sequence[Sequence[tuple[str, ChartLine]]], width: float) -> Iterator[str]:
    """Yield the legend above the plot, each row aligned to the right."""
    for number, row in enumerate(rows):
        at, y = float(width - RIGHT), 29 + LEGEND_HEIGHT * number
        for colour, line in reversed(row):
            at -= _entry_width(line)
            dash = ' stroke-dasharray="5 4"' if line.dashed else ""
            yield (
                f'<line x1="{at:.0f}" x2="{at + 18:.0f}" y1="{y}" y2="{y}" stroke="{colour}" '
                f'stroke-width="2.4"{dash}/>'
                f'<text x="{at + 22:.0f}" y="{y + 4}">{escape(line.name)}</text>'
            )


# --- bars, from 0 -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """Row of parts with tooltip, length and colour; `error`: half the interval of a figure."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    error: float = 0.0


def draw_figures(
    title: str, figures: Sequence[tuple[str, float, float]], unit: str, width: float = WIDTH
) -> str:
    """Draw a bar for each (name, figure, half of its interval or 0)."""
    bars = []
    for index, (name, value, error) in enumerate(figures):
        sure = f" ± {format_number(error)}" if error else ""
        tip = f"{name}: {format_number(value)}{sure}"
        bars.append(Bar(name, [(tip, value, COLOURS[index % len(COLOURS)])], error))
    high = max((value + error for _, value, error in figures), default=0.0) * 1.02 or 1.0
    ticks = [(at, format_number(at)) for at in choose_ticks(0.0, high, 5) if at <= high]
    body, below = _draw_bars(bars, high, ticks, unit, width)
    return _build_svg(title, width, below + 44, body)


def draw_shares(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str = "share",
    width: float = WIDTH,
) -> str:
    """Draw a bar for each name, divided into its shares; the legend lists the shares that occur."""
    rows = [
        Bar(
            name,
            [
                (f"{name}: {part.replace('_', ' ')} {share:.1%}", share, colours[part])
                for part, share in shares.items()
            ],
        )
        for name, shares in bars.items()
    ]
    ticks = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    body, below = _draw_bars(rows, 1.0, ticks, unit, width)
    entries = list(_share_legend(bars, colours, below + 52, width))
    lines = 1 + max((line for line, _ in entries), default=0)
    body += [entry for _, entry in entries]
    return _build_svg(title, width, below + 44 + 18 * lines, body)


def _draw_bars(
    bars: Sequence[Bar], high: float, ticks: Sequence[tuple[float, str]], unit: str, width: float
) -> tuple[list[str], float]:
    """Return bars on a scale up to `high` with its ticks, and where they end below."""
    x = _Scale(0.0, high, BAR_LEFT, width - RIGHT)
    body: list[str] = []
    for index, bar in enumerate(bars):
        y = BARS_TOP + index * BAR_HEIGHT
        body.append(_draw_text(BAR_LEFT - 8, y + 14, bar.name, anchor="end"))
        at = 0.0
        for tip, value, colour in bar.parts:
            size = f'width="{x(max(value, 0)) - BAR_LEFT:.1f}" height="{BAR_HEIGHT - 7}"'
            place = f'x="{x(at):.1f}" y="{y}" {size} fill="{colour}"'
            body.append(f"<rect {place}><title>{escape(tip)}</title></rect>")
            at += value
        if bar.error:
            low, end = x(at - bar.error), x(at + bar.error)
            middle = y + (BAR_HEIGHT - 7) / 2
            ends = "".join(f"M{place:.1f} {middle - 5:.1f}v10" for place in (low, end))
            path = f"M{low:.1f} {middle:.1f}H{end:.1f}{ends}"
            body.append(f'<path d="{path}" stroke="#1c1c1c" fill="none"/>')
    below = BARS_TOP + len(bars) * BAR_HEIGHT
    if not bars:
        return [_draw_text(width / 2, below + 12, "no figures yet", kind="faint")], below
    body += [_draw_text(x(at), below + 12, text) for at, text in ticks]
    body.append(_draw_text((BAR_LEFT + width - RIGHT) / 2, below + 30, unit, kind="label"))
    return body, below


def _share_legend(
    bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], top: float, room: float
) -> Iterator[tuple[int, str]]:
    """Yield (row, entry), in the order of the colours."""
    found = {part for shares in bars.values() for part, share in shares.items() if share >= 0.001}
    row, at = 0, 0.0
    for part in (p for p in colours if p in found):
        width = 6.4 * len(part) + 30
        if at + width > room and at > 0:
            row, at = row + 1, 0.0
        y = top + 18 * row
        name = escape(part.replace("_", " "))
        yield (
            row,
            f'<rect x="{at:.0f}" y="{y - 10}" width="12" height="12" fill="{colours[part]}"/>'
            f'<text x="{at + 17:.0f}" y="{y}">{name}</text>',
        )
        at += width
