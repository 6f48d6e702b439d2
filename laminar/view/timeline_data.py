"""Contents of the timeline: which bars, arcs and lines a part of the picture shows.

Reads   tables of facts
Gives   Timeline, the intervals of a run as arrays; draw_part: Drawing, for a visible part of it

A row is a process. Its background has what it did or waited for; on it lie the trajectories that
ran there, the versions that a relay held, or the steps of the trainer. Where a part has more bars
than a browser draws quickly, it is drawn as cells instead: each cell has the mean number of bars in
it, their mean version, and the state that filled most of it. Nothing outside the part is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from laminar.view.colours import STATE_COLOURS, mix_states, version_colour, version_colours

BARS_MAX = 4_000  #: most bars that are drawn one by one
LANES_MAX = 60  #: most rows of which bars are drawn one by one
COLUMNS, ROWS = 360, 256  #: most cells of a part
LINES_MAX = 120  #: most publishes and arcs
LABEL = 0.03  #: of the width, for the name of a version
MARGIN = 0.12  #: of a row above and below its bars

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tables = Callable[[str], pa.Table]


class Bars(NamedTuple):
    """Intervals by row, in the order of their begin."""

    row: Ints
    begin: Floats
    end: Floats
    value: Ints  #: version, or code of a state
    source: Ints  #: place in its table of facts, to look up what is shown of it


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
    stays: Bars  #: placements on replicas and hosts
    held: Bars  #: versions that relays hold
    publishes: tuple[Floats, Ints]  #: time and version
    arcs: tuple[Floats, Floats, Ints, Ints, Ints]  #: begin, end, rows, place in migrations
    peaks: Floats  #: most bars at a time, by row


class Cells(NamedTuple):
    """Part as cells, [rows, columns] each, the first row on top."""

    part: Part
    colour: NDArray[np.uint32]  #: RGBA
    running: NDArray[np.float32]
    version: NDArray[np.float32]
    state: NDArray[np.int32]


class Drawing(NamedTuple):
    """Contents of a part: either bars or cells."""

    bars: dict[str, list[Any]]
    background: dict[str, list[Any]]
    cells: Cells | None
    publishes: dict[str, list[Any]]
    arcs: dict[str, list[Any]]
    ticks: dict[int, str]  #: names of rows to write at the axis
    lines: list[int]  #: rows that are high enough to have a line between them


def build_timeline(tables: Tables, seconds: float) -> Timeline:
    """Collect the intervals of all processes, of a run of so many seconds."""
    lives = tables("processes")
    rows = order_rows(
        zip(lives["process"].to_pylist(), lives["role"].to_pylist(), strict=True),
        tables("replica_states")["replica"].unique().to_pylist(),
    )
    index = pa.array(rows, pa.string())
    waits, steps = tables("trainer_waits"), tables("steps")
    trainer = next((i for i, name in enumerate(rows) if name.startswith("trainer")), -1)
    parts = [
        _make_bars(tables("replica_states"), "replica", "state", index, seconds),
        _make_bars(waits, trainer, "reason", index, seconds),
        _make_bars(
            steps, trainer, pa.scalar("training"), index, seconds, names=("ordered", "completed")
        ),
    ]
    states = sorted({state for _, found in parts for state in found})
    stays = _make_bars(
        tables("placements"), "replica", "version", index, seconds, names=("dispatched", "left_at")
    )
    held = _make_bars(tables("holdings"), "relay", "version", index, seconds)
    versions = tables("versions")
    return Timeline(
        tuple(rows),
        tuple(states),
        seconds,
        _join_bars([_recode(bars, found, states) for bars, found in parts]),
        stays[0],
        held[0],
        (_floats(versions["published"]), _ints(versions["version"])),
        _make_arcs(tables("migrations"), index, seconds),
        np.maximum(_find_peaks(stays[0], len(rows)), _find_peaks(held[0], len(rows))),
    )


def order_rows(lives: Any, replicas: Sequence[str]) -> list[str]:
    """Return the names of rows: the trainer, replicas, hosts of agents, relays."""
    roles = {"trainer": 0, "rollout": 1, "agent": 2, "relay": 3}
    found = {name: roles[str(role)] for name, role in lives if str(role) in roles}
    found |= dict.fromkeys(replicas, roles["rollout"])
    return sorted(found, key=lambda name: (found[name], _split_numbers(name)))


def draw_part(timeline: Timeline, part: Part, lanes: LaneBook) -> Drawing:
    """Choose what a part shows."""
    low, high = max(int(part.y0), 0), min(int(np.ceil(part.y1)), len(timeline.rows))
    stays = _select(timeline.stays, part, low, high)
    held = _select(timeline.held, part, low, high)
    background = _select(timeline.background, part, low, high)
    lines = _draw_publishes(timeline, part), _draw_arcs(timeline, part)
    ticks = _choose_ticks(timeline.rows, low, high)
    between = list(range(low, high + 1)) if high - low <= LANES_MAX else []
    many = len(stays.row) + len(held.row) + len(background.row) > BARS_MAX
    if many or high - low > LANES_MAX:
        cells = _fill_cells(timeline, part, low, high, (stays, held, background))
        return Drawing(empty_bars(), empty_bars(), cells, *lines, ticks, between)
    bars = _list_bars(stays, "trajectory", lanes.assign("stays", timeline.stays, stays))
    for name, values in _list_bars(held, "held", lanes.assign("held", timeline.held, held)).items():
        bars[name] += values
    return Drawing(bars, _list_background(timeline, background), None, *lines, ticks, between)


class LaneBook:
    """Lanes of bars that overlap in a row, kept so that a bar stays where it is while panning."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[dict[int, int], int]] = {}

    def assign(self, name: str, everything: Bars, chosen: Bars) -> tuple[Floats, Floats]:
        """Return top and bottom of the chosen bars, as shares of their row."""
        lane = np.zeros(len(chosen.row))
        count = np.ones(len(chosen.row))
        for row in np.unique(chosen.row).tolist():
            if (name, row) not in self._known:
                self._known[name, row] = _assign_lanes(everything, row)
            known, most = self._known[name, row]
            here = chosen.row == row
            lane[here] = [known[source] for source in chosen.source[here].tolist()]
            count[here] = most
        height = (1 - 2 * MARGIN) / count
        return MARGIN + lane * height, MARGIN + (lane + 1) * height


def _assign_lanes(bars: Bars, row: int) -> tuple[dict[int, int], int]:
    """Give each bar of a row the first lane that is free at its begin."""
    here = bars.row == row
    ends: list[float] = []
    found: dict[int, int] = {}
    for begin, end, source in zip(
        bars.begin[here].tolist(), bars.end[here].tolist(), bars.source[here].tolist(), strict=True
    ):
        lane = next((i for i, free in enumerate(ends) if free <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        found[source] = lane
    return found, max(len(ends), 1)


# --- from tables to arrays ------------------------------------------------------------------------


def _make_bars(
    table: pa.Table,
    row: str | int,
    value: str | pa.Scalar,
    index: pa.Array,
    seconds: float,
    *,
    names: tuple[str, str] = ("began", "ended"),
) -> tuple[Bars, list[str]]:
    """Return the bars of a table; texts as values become codes, with the list of their texts."""
    begin = _floats(table[names[0]])
    end = _floats(pc.fill_null(table[names[1]], seconds))
    rows = np.full(len(begin), row) if isinstance(row, int) else _places(table[row], index)
    texts: list[str] = []
    if isinstance(value, pa.Scalar):
        texts, values = [value.as_py()], np.zeros(len(begin), np.int64)
    elif pa.types.is_integer(table[value].type):
        values = _ints(table[value])
    else:
        texts = sorted(text for text in table[value].unique().to_pylist() if text)
        values = _places(table[value], pa.array(texts, pa.string()))
    kept = np.flatnonzero((rows >= 0) & np.isfinite(begin))
    kept = kept[np.argsort(begin[kept], kind="stable")]
    return Bars(rows[kept], begin[kept], end[kept], values[kept], kept), texts


def _recode(bars: Bars, texts: Sequence[str], all_texts: Sequence[str]) -> Bars:
    codes = np.array([all_texts.index(text) for text in texts] or [0], np.int64)
    return bars._replace(value=codes[bars.value])


def _join_bars(parts: Sequence[Bars]) -> Bars:
    """Join bars of several tables; `source` has the number of the table in its highest bits."""
    numbered = [
        part._replace(source=part.source + (number << TABLE_BITS))
        for number, part in enumerate(parts)
    ]
    columns: list[Any] = [np.concatenate(columns) for columns in zip(*numbered, strict=True)]
    joined = Bars(*columns)
    return _take(joined, np.argsort(joined.begin, kind="stable"))


def _take(bars: Bars, chosen: Any) -> Bars:
    columns: list[Any] = [column[chosen] for column in bars]
    return Bars(*columns)


TABLE_BITS = 40
BACKGROUND_TABLES = ("replica_states", "trainer_waits", "steps")
"""Tables of the background, by the number in `source`."""


def split_source(source: int) -> tuple[str, int]:
    """Return the table of a bar of the background, and the place in it."""
    return BACKGROUND_TABLES[source >> TABLE_BITS], source & ((1 << TABLE_BITS) - 1)


def _make_arcs(
    table: pa.Table, index: pa.Array, seconds: float
) -> tuple[Floats, Floats, Ints, Ints, Ints]:
    begin, end = _floats(table["ordered"]), _floats(pc.fill_null(table["freed"], seconds))
    source, destination = _places(table["source"], index), _places(table["destination"], index)
    kept = np.flatnonzero((source >= 0) & (destination >= 0))
    return begin[kept], end[kept], source[kept], destination[kept], kept


def _find_peaks(bars: Bars, rows: int) -> Floats:
    """Return the most bars at a time of each row."""
    changes = np.concatenate((np.ones(len(bars.row)), -np.ones(len(bars.row))))
    times, row = np.concatenate((bars.begin, bars.end)), np.concatenate((bars.row, bars.row))
    order = np.lexsort((changes, times, row))
    count = np.cumsum(changes[order])  # back at 0 after each row
    found = np.zeros(rows)
    np.maximum.at(found, row[order], count)
    return found


def _floats(column: Any) -> Floats:
    found: Floats = pc.fill_null(column, float("nan")).to_numpy().astype(np.float64)
    return found


def _ints(column: Any) -> Ints:
    found: Ints = pc.fill_null(column, -1).to_numpy().astype(np.int64)
    return found


def _places(column: Any, index: pa.Array) -> Ints:
    """Return the place of each text in the index; -1: it is not there."""
    return _ints(pc.index_in(column, value_set=index))


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts rollout-2 before rollout-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# --- from arrays to a drawing ---------------------------------------------------------------------


def _select(bars: Bars, part: Part, low: int, high: int) -> Bars:
    stop = np.searchsorted(bars.begin, part.x1, "right")
    near = _take(bars, slice(stop))
    seen = (near.end >= part.x0) & (near.row >= low) & (near.row < high)
    return _take(near, np.flatnonzero(seen))


def empty_cells() -> Cells:
    none = np.zeros((0, 0))
    whole, real = none.astype(np.int32), none.astype(np.float32)
    return Cells(Part(0, 0, 0, 0), none.astype(np.uint32), real, real, whole)


def empty_bars() -> dict[str, list[Any]]:
    names = ("left", "right", "top", "bottom", "colour", "text", "source", "kind")
    return {name: [] for name in names}


def _list_bars(bars: Bars, kind: str, edges: tuple[Floats, Floats]) -> dict[str, list[Any]]:
    top, bottom = edges
    return {
        "left": bars.begin.tolist(),
        "right": bars.end.tolist(),
        "top": (bars.row + top).tolist(),
        "bottom": (bars.row + bottom).tolist(),
        "colour": [version_colour(version) for version in bars.value.tolist()],
        "text": [f"v{version}" for version in bars.value.tolist()],
        "source": bars.source.tolist(),
        "kind": [kind] * len(bars.row),
    }


def _list_background(timeline: Timeline, bars: Bars) -> dict[str, list[Any]]:
    names = [timeline.states[code] for code in bars.value.tolist()]
    return {
        "left": bars.begin.tolist(),
        "right": bars.end.tolist(),
        "top": (bars.row + MARGIN / 2).tolist(),
        "bottom": (bars.row + 1 - MARGIN / 2).tolist(),
        "colour": [STATE_COLOURS.get(name, STATE_COLOURS[""]) for name in names],
        "text": names,
        "source": bars.source.tolist(),
        "kind": ["background"] * len(names),
    }


def _fill_cells(
    timeline: Timeline, part: Part, low: int, high: int, found: tuple[Bars, Bars, Bars]
) -> Cells:
    """Draw a part as cells; rows that share a cell are averaged."""
    height = min(max(high - low, 1), ROWS)
    shape = (height, COLUMNS)
    grid = _Grid(part, low, max(high - low, 1), shape)
    stays, held, background = found
    running = grid.cover(stays) + grid.cover(held)
    weighted = grid.cover(stays, stays.value) + grid.cover(held, held.value)
    version = np.where(running > 0, weighted / np.maximum(running, 1e-12), -1.0)
    shares = np.stack(
        [
            grid.cover(_take(background, background.value == code))
            for code in range(len(timeline.states))
        ]
        or [np.zeros(shape)]
    )
    full = np.zeros(height)
    rows = np.arange(max(high - low, 0))
    np.maximum.at(full, rows * height // max(high - low, 1), timeline.peaks[low:high])
    cover = running / np.maximum(full, 1)[:, None]
    colour = mix_states(timeline.states, shares, version_colours(version), cover)
    state = np.where(shares.sum(axis=0) > 0, shares.argmax(axis=0), -1)
    return Cells(
        Part(part.x0, part.x1, low, high),
        colour,
        running.astype(np.float32),
        version.astype(np.float32),
        state.astype(np.int32),
    )


class _Grid:
    """Cells of a part: how much of each is covered by bars, exactly."""

    def __init__(self, part: Part, low: int, rows: int, shape: tuple[int, int]) -> None:
        self._x0, self._low, self._rows, self._shape = part.x0, low, rows, shape
        self._width = max(part.x1 - part.x0, 1e-9) / shape[1]

    def cover(self, bars: Bars, weights: Ints | None = None) -> Floats:
        """Return the mean number of bars in each cell, each with its weight."""
        height, columns = self._shape
        row = (bars.row - self._low) * height // self._rows
        weight = np.ones(len(row)) if weights is None else weights.astype(np.float64)
        total = np.zeros((height, columns + 1))
        for time, sign in ((bars.begin, 1.0), (bars.end, -1.0)):
            # A bar from its begin on covers the rest of its first cell, and all later ones.
            place = np.clip((time - self._x0) / self._width, 0, columns)
            first = place.astype(np.int64)
            flat = row * (columns + 1) + first
            rest = (first + 1 - place) * weight * sign
            size = height * (columns + 1)
            opened = np.bincount(flat, weight * sign, size).reshape(height, columns + 1)
            partly = np.bincount(flat, rest, size).reshape(height, columns + 1)
            total += np.cumsum(opened, axis=1) - opened + partly
        found: Floats = total[:, :columns] / max(self._rows / height, 1)
        return found


def _draw_publishes(timeline: Timeline, part: Part) -> dict[str, list[Any]]:
    time, version = timeline.publishes
    seen = np.flatnonzero((time >= part.x0) & (time <= part.x1))
    seen = seen[:: max(1, -(-len(seen) // LINES_MAX))]
    times, texts, right = time[seen].tolist(), [], float("-inf")
    for at, number in zip(times, version[seen].tolist(), strict=True):
        has_room = at >= right
        texts.append(f"v{number}" if has_room else "")
        right = at + (part.x1 - part.x0) * LABEL if has_room else right
    return {"x": times, "text": texts}


def _draw_arcs(timeline: Timeline, part: Part) -> dict[str, list[Any]]:
    begin, end, source, destination, place = timeline.arcs
    low, high = np.minimum(source, destination), np.maximum(source, destination)
    seen = np.flatnonzero(
        (begin <= part.x1) & (end >= part.x0) & (low < part.y1) & (high + 1 > part.y0)
    )
    seen = seen[:: max(1, -(-len(seen) // LINES_MAX))]
    x0, x1 = begin[seen], end[seen]
    y0, y1 = source[seen] + 0.5, destination[seen] + 0.5
    bend = (part.x1 - part.x0) * 0.02
    columns = {
        "x0": x0, "y0": y0, "x1": x1, "y1": y1, "source": place[seen],
        "cx0": x0 + bend, "cy0": y0, "cx1": x1 + bend, "cy1": y1,
    }  # fmt: skip
    return {name: values.tolist() for name, values in columns.items()}


def _choose_ticks(rows: Sequence[str], low: int, high: int) -> dict[int, str]:
    """Name at most forty rows of a part."""
    every = max(1, -(-(high - low) // 40))
    return {row: rows[row] for row in range(low, high) if row % every == 0}
