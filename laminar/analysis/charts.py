"""Charts as inline SVG: lines with error bars, bars of figures, bars of shares. Dark on light.

Reads   numbers
Gives   SVG text that needs nothing else: no script, no font, no link

A chart has a title, its axes have a unit, and every point shows its values when the mouse rests on
it (`<title>`). More points than can be distinguished are drawn as the means of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = (
    "#1f5fa8", "#c4501b", "#23804a", "#7d3fb0", "#a67a00", "#b8336a", "#1b8a8f", "#5c5c5c",
)  # fmt: skip
"""Of lines; each has a contrast of at least 3 to white."""
POINTS_MAX = 400

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 34, 44
LEGEND_HEIGHT = 17  #: of each row but the first, for which there is room
BAR_HEIGHT, BAR_LEFT, BARS_TOP = 26, 104, 26
BAR_WIDTH = WIDTH - RIGHT - BAR_LEFT


@dataclass(frozen=True)
class Line:
    """Points in the order of x; y, low and high of a point are None where there is none."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    error: Sequence[float] = ()  #: half the length of an error bar, of each point
    dashed: bool = False
    colour: int = -1  #: of COLOURS; -1: by its place in the chart
    marks: bool = False  #: few points, each of which counts


@dataclass(frozen=True)
class Chart:
    """What is drawn, with the units of both axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    y_range: tuple[float, float] | None = None  #: None: what the values need
    x_range: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """A measured figure; `error`: half the length of its interval, 0: not known."""

    name: str
    value: float
    error: float


@dataclass
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def draw(chart: Chart) -> str:
    """The chart; with a sentence in it where there is nothing to draw."""
    lines = [(_colour(line, i), _thinned(line)) for i, line in enumerate(chart.lines)]
    points = [p for _, line in lines for p in _points(line)]
    if not points:
        faint = _text(WIDTH / 2, HEIGHT / 2, "no figures yet", kind="faint")
        return _svg(chart.title, HEIGHT, [faint])
    x, y = _scales(chart, points)
    plot = [*_axes(chart, x, y)]
    for colour, line in lines:
        plot += _line(line, colour, x, y)
    rows = _rows([(colour, line) for colour, line in lines if any(_points(line))])
    lower = LEGEND_HEIGHT * max(len(rows) - 1, 0)
    body = [f'<g transform="translate(0 {lower})">', *plot, "</g>", *_legend(rows)]
    return _svg(chart.title, HEIGHT + lower, body)


def _svg(title: str, height: float, body: Iterable[str]) -> str:
    head = f'<text x="0" y="14" class="title">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{head}{''.join(body)}</svg>"
    )


def _colour(line: Line, place: int) -> str:
    return COLOURS[(line.colour if line.colour >= 0 else place) % len(COLOURS)]


def _thinned(line: Line) -> Line:
    """Means of neighbours, at most POINTS_MAX of them."""
    per = -(-len(line.x) // POINTS_MAX)
    if per < 2:
        return line
    parts = [slice(i, i + per) for i in range(0, len(line.x), per)]
    ys = [[v for v in line.y[part] if v is not None] for part in parts]
    return Line(
        line.name,
        [_mean(line.x[part]) for part in parts],
        [_mean(values) if values else None for values in ys],
        dashed=line.dashed,
        colour=line.colour,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _points(line: Line) -> Iterator[tuple[float, float, float]]:
    """(x, y, half of the error bar) of every point that is there."""
    errors = line.error or [0.0] * len(line.x)
    for x, y, error in zip(line.x, line.y, errors, strict=True):
        if y is not None and math.isfinite(y):
            yield x, y, error


def _scales(chart: Chart, points: Sequence[tuple[float, float, float]]) -> tuple[_Scale, _Scale]:
    xs = chart.x_range or (min(p[0] for p in points), max(p[0] for p in points))
    ys = chart.y_range or value_range(points)
    x = _Scale(*_opened(*xs), LEFT, WIDTH - RIGHT)
    y = _Scale(*_opened(*ys), HEIGHT - BOTTOM, TOP)
    x.ticks, y.ticks = ticks(x.low, x.high, 7), ticks(y.low, y.high, 5)
    if chart.y_range is None:  # end at a tick, so that the highest value has a figure above it
        step = y.ticks[1] - y.ticks[0]
        y.low, y.high = math.floor(y.low / step) * step, math.ceil(y.high / step) * step
        y.ticks = ticks(y.low, y.high, 5)
    return x, y


def value_range(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """From the lowest to the highest, error bars included; from 0 where 0 is not far away."""
    listed = list(points)
    low, high = min(y - e for _, y, e in listed), max(y + e for _, y, e in listed)
    if -high / 50 <= low <= high / 2:  # also what rounding has put just below 0
        low = 0.0
    elif low / 2 <= high < 0:
        high = 0.0
    return low, high


def _opened(low: float, high: float) -> tuple[float, float]:
    """A single value has a range around it."""
    if high > low:
        return low, high
    around = abs(low) / 2 or 0.5
    return (low - around, high + around) if low else (0.0, 1.0)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`: about `count`, at least two."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = max(math.floor(high / step + 1e-9), first + 1)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """Short, as it stands on an axis."""
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _axes(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    """Figures at both axes, a faint line at each of y, the labels with the units."""
    for value in y.ticks:
        if y.low - 1e-9 <= value <= y.high * (1 + 1e-9) + 1e-12:
            yield _rule(y(value), "grid")
            yield _text(LEFT - 7, y(value) + 4, number(value), anchor="end")
    for value in x.ticks:
        if x.low <= value <= x.high:
            yield _text(x(value), HEIGHT - BOTTOM + 17, number(value))
    yield _rule(HEIGHT - BOTTOM, "axis")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_label, kind="label")
    height = (TOP + HEIGHT - BOTTOM) / 2
    turned = f' transform="rotate(-90 12 {height})"'
    yield _text(12, height, chart.y_label, kind="label", more=turned)


def _rule(y: float, kind: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "", more: str = ""
) -> str:
    name = f' class="{kind}"' if kind else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}{name}{more}>{escape(text)}</text>"


def _line(line: Line, colour: str, x: _Scale, y: _Scale) -> Iterator[str]:
    points = list(_points(line))
    places = [(x(px), y(py)) for px, py, _ in points]
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
    shown = line.marks or len(points) < 4
    for (px, py), (value_x, value_y, error) in zip(places, points, strict=True):
        if error:
            yield _error_bar(px, y(value_y - error), y(value_y + error), colour)
        tooltip = f"{line.name}: {number(value_y)}" + (f" ± {number(error)}" if error else "")
        fill = colour if shown else "transparent"
        yield (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{3.2 if shown else 5}" fill="{fill}">'
            f"<title>{escape(tooltip)} (at {number(value_x)})</title></circle>"
        )


def _error_bar(x: float, low: float, high: float, colour: str) -> str:
    ends = "".join(f"M{x - 4:.1f} {end:.1f}h8" for end in (low, high))
    return f'<path d="M{x:.1f} {low:.1f}V{high:.1f}{ends}" stroke="{colour}" fill="none"/>'


def _rows(lines: Sequence[tuple[str, Line]]) -> list[list[tuple[str, Line]]]:
    """The entries of a legend, in rows that are not too wide; a single line needs none."""
    rows: list[list[tuple[str, Line]]] = []
    left = 0.0
    for colour, line in lines if len(lines) > 1 else ():
        if not rows or _entry_width(line) > left:
            rows.append([])
            left = WIDTH - RIGHT
        rows[-1].append((colour, line))
        left -= _entry_width(line)
    return rows


def _entry_width(line: Line) -> float:
    return 6.6 * len(line.name) + 36


def _legend(rows: Sequence[Sequence[tuple[str, Line]]]) -> Iterator[str]:
    """Above the plot, each row up to the right."""
    for number, row in enumerate(rows):
        at, y = float(WIDTH - RIGHT), 26 + LEGEND_HEIGHT * number
        for colour, line in reversed(row):
            at -= _entry_width(line)
            dash = ' stroke-dasharray="5 4"' if line.dashed else ""
            yield (
                f'<line x1="{at:.0f}" x2="{at + 18:.0f}" y1="{y}" y2="{y}" stroke="{colour}" '
                f'stroke-width="2.4"{dash}/>'
                f'<text x="{at + 22:.0f}" y="{y + 4}">{escape(line.name)}</text>'
            )


# --- bars of figures, from 0 --------------------------------------------------------------------


def draw_bars(title: str, bars: Sequence[Bar], unit: str) -> str:
    """A bar for each figure, with its interval."""
    below = BARS_TOP + len(bars) * BAR_HEIGHT
    body: list[str] = []
    if bars:
        x = _Scale(0.0, max(b.value + b.error for b in bars) * 1.02 or 1.0, BAR_LEFT, WIDTH - RIGHT)
        for index, bar in enumerate(bars):
            body += _measured_bar(
                bar, x, BARS_TOP + index * BAR_HEIGHT, COLOURS[index % len(COLOURS)]
            )
        body += [
            _text(x(at), below + 12, number(at)) for at in ticks(0.0, x.high, 5) if at <= x.high
        ]
        body.append(_text(BAR_LEFT + BAR_WIDTH / 2, below + 30, unit, kind="label"))
    else:
        body.append(_text(WIDTH / 2, below + 12, "no figures yet", kind="faint"))
    return _svg(title, below + 44, body)


def _measured_bar(bar: Bar, x: _Scale, y: float, colour: str) -> Iterator[str]:
    yield _text(BAR_LEFT - 8, y + 14, bar.name, anchor="end")
    tip = escape(
        f"{bar.name}: {number(bar.value)}" + (f" ± {number(bar.error)}" if bar.error else "")
    )
    size = f'width="{x(bar.value) - BAR_LEFT:.1f}" height="{BAR_HEIGHT - 7}"'
    yield f'<rect x="{BAR_LEFT}" y="{y}" {size} fill="{colour}"><title>{tip}</title></rect>'
    if bar.error:
        middle, low, high = (
            y + (BAR_HEIGHT - 7) / 2,
            x(bar.value - bar.error),
            x(bar.value + bar.error),
        )
        ends = "".join(f"M{end:.1f} {middle - 5:.1f}v10" for end in (low, high))
        yield f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}{ends}" stroke="#1c1c1c" fill="none"/>'


# --- bars of shares -----------------------------------------------------------------------------


def draw_shares(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str = "share",
) -> str:
    """A bar for each name, cut into its shares; the legend has what occurs."""
    body: list[str] = []
    for index, (name, shares) in enumerate(bars.items()):
        y = BARS_TOP + index * BAR_HEIGHT
        body.append(_text(BAR_LEFT - 8, y + 14, name, anchor="end"))
        body += _bar(name, shares, colours, y)
    below = BARS_TOP + len(bars) * BAR_HEIGHT
    if bars:
        body += [
            _text(BAR_LEFT + share * BAR_WIDTH, below + 12, f"{share:.0%}")
            for share in (0, 0.25, 0.5, 0.75, 1)
        ]
        body.append(_text(BAR_LEFT + BAR_WIDTH / 2, below + 30, unit, kind="label"))
    else:
        body.append(_text(WIDTH / 2, below + 12, "no figures yet", kind="faint"))
    entries = list(_share_legend(bars, colours, below + 52))
    rows = 1 + max((row for row, _ in entries), default=0)
    return _svg(title, below + 44 + 18 * rows, [*body, *(entry for _, entry in entries)])


def _bar(
    name: str, shares: Mapping[str, float], colours: Mapping[str, str], y: float
) -> Iterator[str]:
    at = float(BAR_LEFT)
    for part, share in shares.items():
        tip = escape(f"{name}: {part.replace('_', ' ')} {share:.1%}")
        size = f'width="{max(share, 0) * BAR_WIDTH:.1f}" height="{BAR_HEIGHT - 7}"'
        yield (
            f'<rect x="{at:.1f}" y="{y}" {size} fill="{colours[part]}"><title>{tip}</title></rect>'
        )
        at += share * BAR_WIDTH


def _share_legend(
    bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], top: float
) -> Iterator[tuple[int, str]]:
    """(row, entry), in the order of the colours."""
    found = {part for shares in bars.values() for part, share in shares.items() if share >= 0.001}
    row, at = 0, float(BAR_LEFT)
    for part in (p for p in colours if p in found):
        width = 6.4 * len(part) + 30
        if at + width > WIDTH and at > BAR_LEFT:
            row, at = row + 1, float(BAR_LEFT)
        y = top + 18 * row
        name = escape(part.replace("_", " "))
        yield (
            row,
            f'<rect x="{at:.0f}" y="{y - 10}" width="12" height="12" fill="{colours[part]}"/>'
            f'<text x="{at + 17:.0f}" y="{y}">{name}</text>',
        )
        at += width
