"""Draw the pictures of the documents: boxes and arrows on a grid from a text source, as SVG.

Usage: python tools/make/pictures.py
Reads   docs/pictures/*.toml
Writes  docs/pictures/*.svg, next to each source; a test compares them
Gives   Picture, read, svg: also for pictures whose source is a table of the program
Raises  ValueError: text that does not fit its box, an arrow from or to a missing box

Coordinates are in grid units of 10 pixels, x to the right, y down. A source:

    title = "what it shows, for those who do not see it"
    [box.store]             # by its name
    at = [2, 3]             # upper left corner
    size = [14, 5]
    text = "store\\nSQLite"  # the first line stands out
    kind = "process"        # or "data", "state", "end", "frame" (its text in the upper left corner)
    [[arrow]]
    path = ["store.right", [30, 5], "trainer.top@0.2"]   # sides of boxes (@: how far along), points
    text = "batches"        # above the middle of its longest part, or centred on `text_at`
    kind = "control"        # or "data", "weights", "line" (no head, dashed)
    head = false            # for a line of a chart

Colours are those of the reader's light or dark theme.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import msgspec

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
UNIT = 10  #: pixels
FONT, LINE = 13, 17  #: pixels
CHARACTER = 0.56  #: generous width of a sans-serif character, relative to the font size
BOLD = 1.09
MARGIN = 1.0  #: units around everything
HEAD = "M0,0 L9,4.5 L0,9 z"

STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.page { fill: #ffffff; }
.first { font-weight: 600; }
.box { fill: #f6f8fa; stroke: #59636e; stroke-width: 1.2; }
.data { fill: #fff8e6; stroke: #9a6700; }
.state { fill: #eaf3ff; stroke: #0969da; }
.end { fill: #e9f7ec; stroke: #1a7f37; }
.frame { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.4; }
.arrow-data { stroke: #9a6700; }
.arrow-weights { stroke: #8250df; stroke-width: 2.2; }
.arrow-line { stroke: #8c959f; stroke-dasharray: 3 4; stroke-width: 1; }
.head { fill: #59636e; } .head-data { fill: #9a6700; } .head-weights { fill: #8250df; }
.said { font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .page { fill: #0d1117; }
  .box { fill: #161b22; stroke: #9198a1; } .data { fill: #2b2111; stroke: #d29922; }
  .state { fill: #10233f; stroke: #4493f8; } .end { fill: #12261e; stroke: #3fb950; }
  .frame { fill: none; stroke: #656c76; }
  .arrow { stroke: #9198a1; } .arrow-data { stroke: #d29922; }
  .arrow-weights { stroke: #ab7df8; } .arrow-line { stroke: #656c76; }
  .head { fill: #9198a1; } .head-data { fill: #d29922; } .head-weights { fill: #ab7df8; }
  .said { stroke: #0d1117; }
}
"""

Point: TypeAlias = tuple[float, float]


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: Point
    size: Point
    text: str = ""
    kind: str = "process"


class Arrow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: tuple[str | Point, ...]
    text: str = ""
    kind: str = "control"
    text_at: Point | None = None
    head: bool = True  #: false: a line in the colour of its kind


class Picture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    box: dict[str, Box]
    arrow: tuple[Arrow, ...] = ()


def read(path: Path) -> Picture:
    return msgspec.convert(tomllib.loads(path.read_text()), Picture)


def svg(picture: Picture) -> str:
    """Return the SVG text of a picture, always the same for the same picture."""
    points = [p for arrow in picture.arrow for p in _points(arrow, picture.box)]
    points += [(b.at[0] + b.size[0], b.at[1] + b.size[1]) for b in picture.box.values()]
    width, height = (UNIT * (max(p[axis] for p in points) + MARGIN) for axis in (0, 1))
    frames = {name: box for name, box in picture.box.items() if box.kind == "frame"}
    others = {name: box for name, box in picture.box.items() if box.kind != "frame"}
    headed = (arrow.kind for arrow in picture.arrow if arrow.head and arrow.kind != "line")
    kinds = dict.fromkeys(headed)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">',
        f"<title>{escape(picture.title)}</title>",
        f"<style>{STYLE}</style>",
        "<defs>",
        *(
            f'<marker id="{kind}" viewBox="0 0 9 9" refX="8.5" refY="4.5" markerWidth="9" '
            f'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path class="head head-{kind}" d="{HEAD}"/></marker>'
            for kind in kinds
        ),
        "</defs>",
        f'<rect class="page" width="{width:g}" height="{height:g}" rx="8"/>',
        *(line for name, box in frames.items() for line in _box(name, box)),
        *(_line(arrow, picture.box) for arrow in picture.arrow),
        *(line for name, box in others.items() for line in _box(name, box)),
        *(line for arrow in picture.arrow for line in _said(arrow, picture.box)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(name: str, box: Box) -> Iterable[str]:
    (x, y), (width, height) = box.at, box.size
    yield (
        f'<rect class="box {box.kind}" x="{UNIT * x:g}" y="{UNIT * y:g}" '
        f'width="{UNIT * width:g}" height="{UNIT * height:g}" rx="6"/>'
    )
    rows = box.text.split("\n") if box.text else []
    if box.kind == "frame":
        middle, top, anchor = UNIT * x + UNIT, UNIT * y + LINE, "start"
    else:
        _check_room(name, box, rows)
        middle, anchor = UNIT * (x + width / 2), "middle"
        top = UNIT * (y + height / 2) - LINE * (len(rows) - 1) / 2 + 0.35 * FONT
    for number, row in enumerate(rows):
        first = "" if number else ' class="first"'
        at = f'x="{middle:g}" y="{top + LINE * number:g}"'
        yield f'<text{first} {at} text-anchor="{anchor}">{escape(row)}</text>'


def _check_room(name: str, box: Box, rows: Sequence[str]) -> None:
    widths = [len(row) * CHARACTER * FONT * (1 if n else BOLD) for n, row in enumerate(rows)]
    if max(widths, default=0) > UNIT * box.size[0] or LINE * len(rows) > UNIT * box.size[1]:
        raise ValueError(
            f"box {name}: {box.text!r} does not fit; enlarge the box or shorten the text"
        )


def _points(arrow: Arrow, boxes: Mapping[str, Box]) -> list[Point]:
    return [_anchor(p, boxes) if isinstance(p, str) else p for p in arrow.path]


def _anchor(place: str, boxes: Mapping[str, Box]) -> Point:
    """Return the position of "name.side@share"; share 0 is left or top."""
    place, _, share = place.partition("@")
    name, _, side = place.rpartition(".")
    if name not in boxes or side not in ("left", "right", "top", "bottom"):
        raise ValueError(f"{place!r}: there is no such side of a box")
    (x, y), (width, height) = boxes[name].at, boxes[name].size
    part = float(share or 0.5)
    if side in ("left", "right"):
        return (x + width * (side == "right"), y + height * part)
    return (x + width * part, y + height * (side == "bottom"))


def _line(arrow: Arrow, boxes: Mapping[str, Box]) -> str:
    path = " ".join(f"{UNIT * x:g},{UNIT * y:g}" for x, y in _points(arrow, boxes))
    head = "" if arrow.kind == "line" or not arrow.head else f' marker-end="url(#{arrow.kind})"'
    return f'<polyline class="arrow arrow-{arrow.kind}" points="{path}"{head}/>'


def _said(arrow: Arrow, boxes: Mapping[str, Box]) -> Iterable[str]:
    rows = arrow.text.split("\n") if arrow.text else []
    if arrow.text_at is not None:
        (x, y), up = arrow.text_at, (len(rows) - 1) / 2 * LINE - 0.35 * FONT
    else:
        parts = list(pairwise(_points(arrow, boxes)))
        a, b = max(parts, key=lambda part: abs(part[0][0] - part[1][0]))
        (x, y), up = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), (len(rows) - 1) * LINE + 7
    for number, row in enumerate(rows):
        at = f'x="{UNIT * x:g}" y="{UNIT * y - up + LINE * number:g}"'
        yield f'<text class="said" {at} text-anchor="middle">{escape(row)}</text>'


def main() -> int:
    for source in sorted(FOLDER.glob("*.toml")):
        source.with_suffix(".svg").write_text(svg(read(source)))
        print(source.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
