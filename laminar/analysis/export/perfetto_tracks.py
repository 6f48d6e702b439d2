"""Spans, arrows, flags and figures as a trace that Perfetto and Chrome read.

Reads   nothing
Gives   Trace: collects all of a run; list_events yields them, in the order of the log

A process of the trace is given by name; a thread is one lane of one kind of span, so that spans on
a thread never overlap. Within one event, spans end before others begin, except those that an arrow
of this event leaves.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

LANES_PER_KIND = 10_000
END, BEGIN, INNER, ARROW, LATE_END = range(5)
"""Order of the parts of one event."""


class Time(NamedTuple):
    """Event and its time in seconds."""

    event: int
    seconds: float


@dataclass(slots=True, eq=False)
class Span:
    """Span on a lane of a process; `end` is None while it lasts."""

    process: str
    kind: str
    begin: Time
    end: Time | None
    end_args: dict[str, Any]
    inner: int = 0  #: parts inside it, which end with it
    late: bool = False  #: it ends after the arrows of its last event
    lane: int = 0

    def is_open(self, event: int) -> bool:
        """Return whether it is open at this event, both ends included."""
        return self.begin.event <= event and (self.end is None or event <= self.end.event)


class Trace:
    """Trace of a run; `kinds` of lanes in display order, `rank` orders the processes."""

    def __init__(self, kinds: Sequence[str], rank: Callable[[str], int]) -> None:
        self._kinds, self._rank = kinds, rank
        self._parts: list[tuple[int, int, float, Span, dict[str, Any]]] = []
        self._spans: list[Span] = []
        self._pids: dict[str, int] = {}
        self._threads: set[tuple[int, int]] = set()
        self._free = defaultdict[tuple[str, str], list[int]](list)  #: used lanes that are free
        self._used = defaultdict[tuple[str, str], int](int)  #: number of lanes used so far

    def add_span(
        self, process: str, kind: str, name: str, begin: Time, end: Time | None, /, **args: Any
    ) -> Span:
        """Add a span; `end_args` and inner parts may follow."""
        made = Span(process, kind, begin, end, {}, late=end is not None and begin[0] == end[0])
        self._spans.append(made)
        self._add_begin(BEGIN, made, begin, name, args)
        return made

    def add_inner(self, span: Span, at: Time, name: str, /, **args: Any) -> None:
        """Begin a further part inside a span, which ends with it."""
        span.inner += 1
        span.late |= span.end is not None and span.end.event == at.event
        self._add_begin(INNER, span, at, name, args)

    def add_arrow(self, name: str, at: Time, source: Span, target: Span) -> None:
        """Draw an arrow between two spans that are open at this event."""
        common = {"name": name, "cat": "arrow", "id": len(self._parts)}
        for span, fields in ((source, {"ph": "s"}), (target, {"ph": "f", "bp": "e"})):
            span.late |= span.end is not None and span.end.event == at.event
            self._parts.append((*at[:1], ARROW, at.seconds, span, fields | common))

    def add_point(self, process: str, kind: str, at: Time, fields: dict[str, Any]) -> None:
        """Add a flag, figures, or a span that was recorded whole, on the first lane of a kind."""
        self._parts.append((at.event, BEGIN, at.seconds, Span(process, kind, at, at, {}), fields))

    def list_events(self, last: Time) -> Iterator[dict[str, Any]]:
        """Yield everything; spans that last end with the last event."""
        for span in self._spans:
            if span.end is None:
                span.end, span.late, span.end_args = last, True, {"open_at_the_end": True}
            end = (span.end.event, LATE_END if span.late else END, span.end.seconds, span)
            args = {"event": span.end.event} | span.end_args
            self._parts += [(*end, {"ph": "E"})] * span.inner
            self._parts.append((*end, {"ph": "E", "args": args}))
        for _, _, seconds, span, fields in sorted(self._parts, key=itemgetter(0, 1)):
            group, lanes = (span.process, span.kind), self._free[span.process, span.kind]
            if fields["ph"] == "B" and not span.lane:
                span.lane = heapq.heappop(lanes) if lanes else self._used[group] + 1
                self._used[group] = max(self._used[group], span.lane)
            pid = self._pids.setdefault(span.process, len(self._pids) + 1)
            tid = self._kinds.index(span.kind) * LANES_PER_KIND + max(span.lane, 1)
            if (pid, tid) not in self._threads:
                yield from self._name_thread(span, pid, tid)
            yield {**fields, "ts": round(seconds * 1e6, 3), "pid": pid, "tid": tid}
            if fields["ph"] == "E" and "args" in fields:
                heapq.heappush(lanes, span.lane)

    def _add_begin(self, order: int, span: Span, at: Time, name: str, args: dict[str, Any]) -> None:
        fields = {"ph": "B", "name": name, "cat": span.kind, "args": {"event": at.event} | args}
        self._parts.append((at.event, order, at.seconds, span, fields))

    def _name_thread(self, span: Span, pid: int, tid: int) -> Iterator[dict[str, Any]]:
        """Yield the name and the place of a thread, and of its process."""
        place, label = {"pid": pid, "tid": tid}, span.kind
        label += f" {span.lane}" if span.lane > 1 else ""
        names: list[tuple[str, dict[str, int], str, Any]] = [
            ("thread_name", place, "name", label),
            ("thread_sort_index", place, "sort_index", tid),
        ]
        if (pid, 0) not in self._threads:
            names += [("process_name", {"pid": pid}, "name", span.process)]
            order = self._rank(span.process)
            names += [("process_sort_index", {"pid": pid}, "sort_index", order)]
        self._threads |= {(pid, tid), (pid, 0)}
        for what, where, key, value in names:
            yield {"ph": "M", "name": what, **where, "args": {key: value}}
