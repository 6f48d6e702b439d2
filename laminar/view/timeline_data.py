"""Contents of the timeline: which bars, arcs and lines a part of the picture shows.

Reads   tables of facts
Gives   Timeline, the intervals of a run as arrays; draw_part: Drawing, for a visible part of it

A row is a process. Its background has what it did or waited for; on it lie the trajectories that
ran there, or the versions that a relay held. Where a part has more bars than a browser draws
quickly, it is drawn as cells instead: each has the mean number of bars in it, their mean version,
and the state that filled most of it. Nothing outside the part is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from laminar.view.colours import find_state_colour, mix_states, version_colour, version_colours

BARS_MAX = 4_000  #: most bars that are drawn one by one
LANES_MAX = 60  #: most rows of which bars are drawn one by one
COLUMNS, ROWS = 300, 192  #: most cells of a part
LINES_MAX, NAMES_MAX = 120, 40  #: most publishes and arcs; most rows that are named
NO_STATE = 255
LABEL = 0.03  #: of the width, for the name of a version
MARGIN = 0.12  #: of a row above and below its bars
ORDER = {"trainer": 0, "rollout": 1, "agent": 2, "relay": 3}  #: of the roles that have rows

BACKGROUND = ("replica_states", "trainer_waits", "steps")
BARS = ("placements", "holdings")
TABLES = (*BACKGROUND, *BARS)  #: by the number in `Bars.source`
SPANS = {"steps": ("ordered", "completed"), "placements": ("dispatched", "left_at")}
OWNERS = {"replica_states": "replica", "placements": "replica", "holdings": "relay"}
KINDS = {"replica_states": "state", "trainer_waits": "reason"}
TABLE_BITS = 40

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tables = Callable[[str], pa.Table]
Columns = dict[str, list[Any]]


class Bars(NamedTuple):
    """Intervals by row, in the order of their begin."""

    row: Ints
    begin: Floats
    end: Floats
    value: Ints  #: version, or code of a state
    source: Ints  #: number of the table, and place in it (split_source)


class Part(NamedTuple):
    """Visible part of the picture: seconds, and rows from the top."""

    x0: float
    x1: float
    y0: float
    y1: float


class Timeline(NamedTuple):
    """Intervals of a run."""

    rows: tuple[str, ...]
    states: tuple[str, ...]  #: text by code
    seconds: float  #: end of the run, or of what is known of it
    background: Bars
    bars: Bars
    peaks: Floats  #: most bars at a time, by row
    publishes: tuple[Floats, Ints]  #: time and version
    arcs: tuple[Floats, Floats, Ints, Ints]  #: begin and end of migrations, and their rows


class Cells(NamedTuple):
    """Part as cells, [rows, columns] each, the first row on top."""

    part: Part
    colour: NDArray[np.uint32]  #: RGBA
    running: NDArray[np.float32]
    version: NDArray[np.float32]
    state: NDArray[np.uint8]  #: code; NO_STATE: none


class Drawing(NamedTuple):
    """Contents of a part: bars, or cells in their place."""

    bars: Columns
    background: Columns
    cells: Cells | None
    publishes: Columns
    arcs: Columns
    names: dict[int, str]  #: of rows, to write at the axis
    lines: list[int]  #: rows that are high enough to have a line between them


def build_timeline(tables: Tables, seconds: float) -> Timeline:
    """Collect the intervals of all processes, of a run of so many seconds."""
    rows = order_rows(tables)
    states = ["training"]
    for name, column in KINDS.items():
        states += sorted(set(tables(name)[column].unique().to_pylist()) - {*states, None})
    made = [_make_bars(tables, name, rows, states, seconds) for name in TABLES]
    bars, migrations, versions = _join_bars(made[3:]), tables("migrations"), tables("versions")
    index = pa.array(rows, pa.string())
    ends = [pc.index_in(migrations[n], value_set=index) for n in ("source", "destination")]
    moved = np.flatnonzero((_ints(ends[0]) >= 0) & (_ints(ends[1]) >= 0))
    times = migrations["ordered"], pc.fill_null(migrations["freed"], seconds)
    return Timeline(
        tuple(rows),
        tuple(states),
        seconds,
        _join_bars(made[:3]),
        bars,
        _find_peaks(bars, len(rows)),
        (_floats(versions["published"]), _ints(versions["version"])),
        (*(_floats(time)[moved] for time in times), *(_ints(end)[moved] for end in ends)),  # type: ignore[arg-type]
    )


def order_rows(tables: Tables) -> list[str]:
    """Return the names of rows: the trainer, replicas, hosts of agents, relays."""
    lives = tables("processes").select(["process", "role"]).to_pylist()
    found = {row["process"]: ORDER[row["role"]] for row in lives if row["role"] in ORDER}
    found |= dict.fromkeys(tables("replica_states")["replica"].unique().to_pylist(), 1)
    numbers = {name: [int(n) for n in re.findall(r"\d+", name)] for name in found}
    return sorted(found, key=lambda name: (found[name], numbers[name], name))


def split_source(source: int) -> tuple[str, int]:
    """Return the table of a bar, and its place there."""
    return TABLES[source >> TABLE_BITS], source & ((1 << TABLE_BITS) - 1)


def draw_part(timeline: Timeline, part: Part, lanes: LaneBook) -> Drawing:
    """Choose what a part shows."""
    low, high = max(int(part.y0), 0), min(int(np.ceil(part.y1)), len(timeline.rows))
    bars, background = (
        _select(bars, part, low, high) for bars in (timeline.bars, timeline.background)
    )
    every = max(1, -(-(high - low) // NAMES_MAX))
    names = {row: timeline.rows[row] for row in range(low, high) if row % every == 0}
    lines = list(range(low, high + 1)) if high - low <= LANES_MAX else []
    rest = _draw_publishes(timeline, part), _draw_arcs(timeline, part), names, lines
    if len(bars.row) + len(background.row) > BARS_MAX or high - low > LANES_MAX:
        cells = _fill_cells(timeline, part, low, high, bars, background)
        return Drawing(list_bars(), list_bars(), cells, *rest)
    versions, codes = bars.value.tolist(), background.value.tolist()
    names_of = [timeline.states[code] for code in codes]
    edge = np.full(len(codes), MARGIN / 2)
    return Drawing(
        list_bars(
            bars,
            lanes.assign(timeline.bars, bars),
            [f"v{version}" for version in versions],
            list(map(version_colour, versions)),
        ),
        list_bars(background, (edge, 1 - edge), names_of, list(map(find_state_colour, names_of))),
        None,
        *rest,
    )


class LaneBook:
    """Lanes of bars that overlap in a row, kept so that a bar stays where it is while panning."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, int]] = {}

    def assign(self, everything: Bars, chosen: Bars) -> tuple[Floats, Floats]:
        """Return top and bottom of the chosen bars, as shares of their row."""
        lane, count = np.zeros(len(chosen.row)), np.ones(len(chosen.row))
        for row in np.unique(chosen.row).tolist():
            if row not in self._known:
                self._known[row] = _assign_lanes(_take(everything, everything.row == row))
            here = chosen.row == row
            lane[here] = [self._known[row][source] for source in chosen.source[here].tolist()]
            count[here] = max(self._known[row].values()) + 1
        height = (1 - 2 * MARGIN) / count
        return MARGIN + lane * height, MARGIN + (lane + 1) * height


def _assign_lanes(bars: Bars) -> dict[int, int]:
    """Give each bar of a row the first lane that is free at its begin."""
    ends: list[float] = []
    found: dict[int, int] = {}
    columns = (column.tolist() for column in (bars.begin, bars.end, bars.source))
    for begin, end, source in zip(*columns, strict=True):
        lane = next((i for i, free in enumerate(ends) if free <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        found[source] = lane
    return found


# --- from tables to arrays ------------------------------------------------------------------------


def _make_bars(
    tables: Tables, name: str, rows: Sequence[str], states: Sequence[str], seconds: float
) -> Bars:
    table, (begin, end) = tables(name), SPANS.get(name, ("began", "ended"))
    owner, kind = OWNERS.get(name), KINDS.get(name)
    trainer = next((i for i, row in enumerate(rows) if row.startswith("trainer")), -1)
    row = _find_places(table[owner], rows) if owner else np.full(len(table), trainer)
    value = _find_places(table[kind], states) if kind else np.zeros(len(table), np.int64)
    value = _ints(table["version"]) if name in BARS else value
    times = _floats(table[begin]), _floats(pc.fill_null(table[end], seconds))
    kept = np.flatnonzero((row >= 0) & np.isfinite(times[0]))
    kept = kept[np.argsort(times[0][kept], kind="stable")]
    source = kept + (TABLES.index(name) << TABLE_BITS)
    return Bars(row[kept], times[0][kept], times[1][kept], value[kept], source)


def _join_bars(parts: Sequence[Bars]) -> Bars:
    columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    joined = Bars(*columns)
    return _take(joined, np.argsort(joined.begin, kind="stable"))


def _take(bars: Bars, chosen: Any) -> Bars:
    columns: list[Any] = [column[chosen] for column in bars]
    return Bars(*columns)


def _find_peaks(bars: Bars, rows: int) -> Floats:
    """Return the most bars at a time of each row."""
    changes = np.repeat((1.0, -1.0), len(bars.row))
    row = np.concatenate((bars.row, bars.row))
    order = np.lexsort((changes, np.concatenate((bars.begin, bars.end)), row))
    found = np.zeros(rows)
    np.maximum.at(found, row[order], np.cumsum(changes[order]))  # it is back at 0 after each row
    return found


def _floats(column: Any) -> Floats:
    found: Floats = pc.fill_null(column, float("nan")).to_numpy().astype(np.float64)
    return found


def _ints(column: Any) -> Ints:
    found: Ints = pc.fill_null(column, -1).to_numpy().astype(np.int64)
    return found


def _find_places(column: Any, texts: Sequence[str]) -> Ints:
    """Return the place of each text in a list; -1: it is not there."""
    return _ints(pc.index_in(column, value_set=pa.array(texts, pa.string())))


# --- from arrays to a drawing ---------------------------------------------------------------------


def _select(bars: Bars, part: Part, low: int, high: int) -> Bars:
    near = _take(bars, slice(np.searchsorted(bars.begin, part.x1, "right")))
    return _take(near, (near.end >= part.x0) & (near.row >= low) & (near.row < high))


def list_bars(
    bars: Bars | None = None,
    edges: tuple[Floats, Floats] | None = None,
    texts: Sequence[str] = (),
    colours: Sequence[str] = (),
) -> Columns:
    """Return the columns of bars as a browser draws them; by default there are none."""
    found: Columns = {"text": list(texts), "colour": list(colours)}
    if bars is None or edges is None:
        return found | {name: [] for name in ("left", "right", "top", "bottom", "source")}
    columns = (bars.begin, bars.end, bars.row + edges[0], bars.row + edges[1], bars.source)
    names = ("left", "right", "top", "bottom", "source")
    return found | {name: column.tolist() for name, column in zip(names, columns, strict=True)}


def _fill_cells(
    timeline: Timeline, part: Part, low: int, high: int, bars: Bars, background: Bars
) -> Cells:
    """Draw a part as cells; rows that share a cell are averaged."""
    rows = max(high - low, 1)
    height = min(rows, ROWS)
    places = np.arange(rows) * height // rows

    def cover(some: Bars, weights: Ints | None = None) -> Floats:
        covered = _cover_cells(part, some, places[some.row - low], height, weights)
        return covered * height / rows if rows > height else covered

    running = cover(bars)
    version = np.where(running > 0, cover(bars, bars.value) / np.maximum(running, 1e-12), -1.0)
    codes = range(len(timeline.states))
    shares = np.stack([cover(_take(background, background.value == code)) for code in codes])
    full = np.ones(height)
    np.maximum.at(full, places[: high - low], timeline.peaks[low:high])
    return Cells(
        Part(part.x0, part.x1, low, high),
        mix_states(timeline.states, shares, version_colours(version), running / full[:, None]),
        running.astype(np.float32),
        version.astype(np.float32),
        np.where(shares.sum(axis=0) > 0, shares.argmax(axis=0), NO_STATE).astype(np.uint8),
    )


def _cover_cells(part: Part, bars: Bars, row: Ints, height: int, weights: Ints | None) -> Floats:
    """Return the exact mean number of bars in each cell, each with its weight."""
    weight = np.ones(len(row)) if weights is None else weights.astype(np.float64)
    width, size = max(part.x1 - part.x0, 1e-9) / COLUMNS, height * (COLUMNS + 1)
    total = np.zeros((height, COLUMNS + 1))
    for time, sign in ((bars.begin, 1.0), (bars.end, -1.0)):
        # A bar from its begin on covers the rest of its first cell, and all later ones.
        place = np.clip((time - part.x0) / width, 0, COLUMNS)
        first = place.astype(np.int64)
        flat = row * (COLUMNS + 1) + first
        opened = np.bincount(flat, weight * sign, size).reshape(total.shape)
        partly = np.bincount(flat, (first + 1 - place) * weight * sign, size).reshape(total.shape)
        total += np.cumsum(opened, axis=1) - opened + partly
    found: Floats = total[:, :COLUMNS]
    return found


def _draw_publishes(timeline: Timeline, part: Part) -> Columns:
    time, version = timeline.publishes
    seen = np.flatnonzero((time >= part.x0) & (time <= part.x1))
    seen = seen[:: max(1, -(-len(seen) // LINES_MAX))]
    times, texts, right = time[seen].tolist(), [], float("-inf")
    for at, number in zip(times, version[seen].tolist(), strict=True):
        has_room = at >= right
        texts.append(f"v{number}" if has_room else "")
        right = at + (part.x1 - part.x0) * LABEL if has_room else right
    return {"x": times, "text": texts}


def _draw_arcs(timeline: Timeline, part: Part) -> Columns:
    begin, end, source, destination = timeline.arcs
    low, high = np.minimum(source, destination), np.maximum(source, destination)
    inside = (begin <= part.x1) & (end >= part.x0) & (low < part.y1) & (high + 1 > part.y0)
    seen = np.flatnonzero(inside)
    seen = seen[:: max(1, -(-len(seen) // LINES_MAX))]
    (x0, x1), (y0, y1) = (begin[seen], end[seen]), (source[seen] + 0.5, destination[seen] + 0.5)
    bend = (part.x1 - part.x0) * 0.02
    columns = {"x0": x0, "y0": y0, "x1": x1, "y1": y1}
    columns |= {"cx0": x0 + bend, "cy0": y0, "cx1": x1 + bend, "cy1": y1}
    return {name: values.tolist() for name, values in columns.items()}
