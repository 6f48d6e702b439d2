"""Draw recorded terminals as an animated SVG, one window below the other.

Usage: python tools/make/recording.py OUT.svg CAST [CAST ...]
Reads   asciicast v2 recordings of one session, on one clock, as docs/pictures/*.cast
Writes  OUT.svg: the session in PLAYED_S seconds, then its end for HELD_S; without motion, its end
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from itertools import groupby
from pathlib import Path

PLAYED_S, HELD_S, RATE = 15, 5, 2  #: RATE: frames per second
STEPS, TOTAL = PLAYED_S * RATE, (PLAYED_S + HELD_S) * RATE
WIDTH, HEIGHT, BAR, PAD = 7.25, 16, 24, 10  #: pixels of a character, a line, a title, a margin
TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]")
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #d1d7e0; white-space: pre; }
rect { fill: #0d1117; stroke: #656c76; } g { visibility: hidden; } .end { visibility: visible; }
.s1 { font-weight: 700; } .s90, .bar { fill: #848d97; } .s36 { fill: #56d4dd; }
"""
Cell = tuple[str, str]  #: style, character


class Screen:
    """The part of a terminal that shells and progress displays use."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height, self.lines = width, height, [list[Cell]()]
        self.row, self.column, self.style = 0, 0, ""

    def write(self, text: str) -> None:
        for token in TOKEN.finditer(text):
            if token[2]:
                self._control(token[1], token[2])
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self.row += 1
                self.lines += [[]] * (self.row == len(self.lines))
            elif self.column == self.width:
                self.write(f"\r\n{token[0]}")
            else:
                line = self.lines[self.row]
                line += [("", " ")] * (self.column + 1 - len(line))
                line[self.column] = (self.style, token[0])
                self.column += 1

    def _control(self, value: str, name: str) -> None:
        if name == "m":
            self.style = "" if value in ("", "0") else f"{self.style} s{value}".strip()
        elif name == "A":
            self.row = max(0, self.row - int(value or 1))
        elif name == "K":
            del self.lines[self.row][0 if value == "2" else self.column :]
        elif name == "J":
            del self.lines[self.row + 1 :], self.lines[self.row][self.column :]
        elif name == "H":
            self.row = self.column = 0

    def get_lines(self) -> list[tuple[Cell, ...]]:
        shown = [tuple(line) for line in self.lines[-self.height :]]
        return shown + [()] * (self.height - len(shown))


def draw_line(line: tuple[Cell, ...], y: float) -> str:
    spans, x = "", float(PAD)
    for style, cells in groupby(line, key=lambda cell: cell[0]):
        text = "".join(character for _, character in cells)
        if shown := escape(text.rstrip()):
            spans += f'<tspan x="{x:g}" class="{style}">{shown}</tspan>'
        x += len(text) * WIDTH
    return f'<text y="{y:g}">{spans}</text>' if spans else ""


def animate_frames(count: int) -> str:
    rule = f".d{count} {{ animation: d{count} {TOTAL / RATE:g}s step-end infinite; }}\n"
    shown = f"0% {{ visibility: visible; }} {100 * count / TOTAL:g}% {{ visibility: hidden; }}"
    return f"{rule}@keyframes d{count} {{ {shown} }}\n"


def main(out: Path, casts: list[Path]) -> None:
    records = [[json.loads(line) for line in path.read_text().splitlines()] for path in casts]
    end_s = max(events[-1][0] for events in records)
    groups, windows, top, across = dict[tuple[int, int], str](), "", 0.5, 0.0
    for header, *events in records:
        screen, frames = Screen(header["width"], header["height"]), []
        for step in range(1, STEPS + 1):
            while events and events[0][0] <= end_s * step / STEPS:
                screen.write(events.pop(0)[2])
            frames.append(screen.get_lines())
        across, down = screen.width * WIDTH + 2 * PAD, screen.height * HEIGHT + BAR + PAD
        title = f"{header['title']} (played {end_s / PLAYED_S:.0f} times faster)"
        windows += f'<rect x=".5" y="{top:g}" width="{across:g}" height="{down}" rx="6"/>\n'
        windows += f'<text class="bar" x="{PAD}" y="{top + 16:g}">{escape(title)}</text>\n'
        for row in range(screen.height):
            last = 0
            for line, same in groupby(frame[row] for frame in frames):
                first, last = last, last + len(list(same))
                span = first, TOTAL if last == STEPS else last
                drawn = draw_line(line, top + BAR + (row + 0.8) * HEIGHT)
                groups[span] = groups.get(span, "") + drawn
        top += down + 6
    rules = "".join(map(animate_frames, sorted({last - first for first, last in groups} - {TOTAL})))
    for (first, last), drawn in sorted(groups.items()):
        kind = f"d{last - first}{' end' * (last == TOTAL)}"
        delay = f"animation-delay:{(first - TOTAL) / RATE:g}s"
        windows += f'<g class="{kind}" style="{delay}">{drawn}</g>\n' if drawn else ""
    rules = f"{STYLE}@media (prefers-reduced-motion: no-preference) {{\n{rules}}}\n"
    size = f'width="{across + 1:g}" height="{top:g}" viewBox="0 0 {across + 1:g} {top:g}"'
    root = f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>'
    out.write_text(f"{root}\n<style>{rules}</style>\n{windows}</svg>\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
