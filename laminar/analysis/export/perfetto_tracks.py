"""Spans, arrows and flags in the trace-event format that Perfetto and Chrome read.

Reads   nothing
Gives   Tracks: every begin, end, arrow, flag and figure as a JSON object, passed to `emit` at once

A process of the trace is given by name; a thread is one lane of one kind of span, so that spans on
a thread never overlap, and each end matches its begin. Times are microseconds and must not
decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

Emit = Callable[[dict[str, Any]], None]
Span = tuple[str, str, str]  #: (process, kind, key); the key is unique among open spans

LANES_PER_KIND = 10_000
FLAGS = "happenings"  #: kind of the lane that carries flags


class _OpenSpan(Struct):
    """Span that has not ended."""

    lane: int
    depth: int = 1  #: 2 once its inner part has begun


class Tracks:
    """Tracks of a trace; `kinds` of lanes in display order, `rank` orders the processes."""

    def __init__(self, emit: Emit, kinds: Sequence[str], rank: Callable[[str], int]) -> None:
        self._emit, self._kinds, self._rank = emit, kinds, rank
        self._pids: dict[str, int] = {}
        self._named: set[tuple[int, int]] = set()  #: threads
        self._free: dict[tuple[str, str], list[int]] = {}  #: used lanes that are free
        self._used: dict[tuple[str, str], int] = {}  #: number of lanes used so far
        self._open: dict[Span, _OpenSpan] = {}
        self._arrows = 0

    def __contains__(self, span: Span) -> bool:
        """Return whether the span is open."""
        return span in self._open

    def begin_span(self, span: Span, us: float, name: str, /, **args: Any) -> None:
        """Open a span on the lowest free lane of its kind."""
        group = span[:2]
        free = self._free.setdefault(group, [])
        if free:
            lane = min(free)
            free.remove(lane)
        else:
            lane = self._used.get(group, 0)
            self._used[group] = lane + 1
        self._open[span] = _OpenSpan(lane)
        self._emit_begin(span, us, name, args)

    def begin_inner(self, span: Span, us: float, name: str, /, **args: Any) -> None:
        """Begin a second part inside an open span; both end together."""
        self._open[span].depth += 1
        self._emit_begin(span, us, name, args)

    def end_span(self, span: Span, us: float, /, **args: Any) -> None:
        """Close a span with its inner part; do nothing if it is not open."""
        found = self._open.get(span)
        if found is None:
            return
        for depth in range(found.depth):
            last = {"args": args} if depth == found.depth - 1 else {}
            self._emit({"ph": "E", "ts": us, **self._locate_span(span), **last})
        del self._open[span]
        self._free[span[:2]].append(found.lane)

    def add_arrow(self, name: str, us: float, source: Span, target: Span) -> None:
        """Draw an arrow from one open span to another."""
        self._arrows += 1
        common = {"name": name, "cat": "arrow", "id": self._arrows, "ts": us}
        self._emit({"ph": "s", **common, **self._locate_span(source)})
        self._emit({"ph": "f", "bp": "e", **common, **self._locate_span(target)})

    def add_instant(self, process: str, us: float, name: str, /, **args: Any) -> None:
        """Add a flag at one moment."""
        place = self._locate_lane(process, FLAGS, 0)
        self._emit({"ph": "i", "s": "t", "name": name, "ts": us, **place, "args": args})

    def add_counters(self, process: str, us: float, name: str, /, **values: int) -> None:
        """Add figures that hold from now on, drawn as a chart of the process."""
        place = self._locate_lane(process, FLAGS, 0)
        self._emit({"ph": "C", "name": name, "ts": us, **place, "args": values})

    def add_span(self, process: str, kind: str, us: float, length_us: float, name: str) -> None:
        """Add a complete span; such spans come in order and do not overlap."""
        place = self._locate_lane(process, kind, 0)
        self._emit({"ph": "X", "name": name, "cat": kind, "ts": us, "dur": length_us, **place})

    def close_all(self, us: float, /, **args: Any) -> None:
        for span in list(self._open):
            self.end_span(span, us, **args)

    def _emit_begin(self, span: Span, us: float, name: str, args: dict[str, Any]) -> None:
        place = self._locate_span(span)
        self._emit({"ph": "B", "name": name, "cat": span[1], "ts": us, **place, "args": args})

    def _locate_span(self, span: Span) -> dict[str, int]:
        return self._locate_lane(span[0], span[1], self._open[span].lane)

    def _locate_lane(self, process: str, kind: str, lane: int) -> dict[str, int]:
        """Return pid and tid; name them on first use."""
        pid = self._pids.get(process)
        if pid is None:
            pid = self._pids[process] = len(self._pids) + 1
            self._emit_metadata("process_name", {"pid": pid}, name=process)
            self._emit_metadata("process_sort_index", {"pid": pid}, sort_index=self._rank(process))
        tid = self._kinds.index(kind) * LANES_PER_KIND + lane + 1
        place = {"pid": pid, "tid": tid}
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._emit_metadata("thread_name", place, name=f"{kind} {lane + 1}" if lane else kind)
            self._emit_metadata("thread_sort_index", place, sort_index=tid)
        return place

    def _emit_metadata(self, what: str, place: dict[str, int], /, **args: Any) -> None:
        self._emit({"ph": "M", "name": what, **place, "args": args})
