"""Timeline files of the processes: spans and engine steps.

Reads   RUN/timeline/NAME.jsonl (spans) and NAME.steps (engine steps), all times unix ns
Gives   Span, and engine steps as int64 arrays [n, 4] of (start, end, sequences, tokens); left_out
Raises  ConfigError for a damaged file; entries truncated by a crash or a full disk are skipped

A step that ends before it begins, because a clock was set back, has no duration.

A restarted process appends to the file of its predecessor. A file of spans that grew large keeps
only its newest parts. Beyond the first two million engine steps, the steps of each half second are
merged into one row, with 0 sequences, for each time without a pause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.log.intervals import Intervals, merge_intervals
from laminar.config import ConfigError
from laminar.run.directory import TIMELINE_DIR, list_parts, older_parts

ROW_BYTES = 4 * 8
COUNT_MAX = 1 << 40  #: largest plausible number of sequences or tokens; any time in ns is larger
JOIN_NS = 20_000_000
"""Longest gap within continuous stepping, 20 ms: commands are processed between steps."""

Steps = NDArray[np.int64]

EMPTY_STEPS: Steps = np.zeros((0, 4), dtype=np.int64)


class TimelineSpan(NamedTuple):
    """Activity of a process."""

    state: str
    start_ns: int
    end_ns: int
    step: int  #: -1 if it belongs to none
    version: int  #: -1 if there is none


def read_spans(run_dir: Path, process: str) -> list[TimelineSpan]:
    """Return the spans in the order in which they ended; empty if the process wrote none."""
    newest = run_dir / TIMELINE_DIR / f"{process}.jsonl"
    spans = []
    for path in list_parts(newest):
        spans += [_parse_span(path, number, fields) for number, fields in read_json_lines(path)]
    return spans


def left_out(newest: Path) -> bool:
    """Return whether older parts of this file of a log or timeline were removed."""
    parts = older_parts(newest)
    return bool(parts) and parts[0][0] > 1


def cut_timelines(run_dir: Path) -> list[str]:
    """Return the processes whose first spans were removed."""
    files = sorted((run_dir / TIMELINE_DIR).glob("*.jsonl"))
    return [path.name.removesuffix(".jsonl") for path in files if left_out(path)]


def read_json_lines(path: Path, errors: str = "strict") -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, value) of every valid line; part of an object is never valid JSON."""
    for number, text in whole_lines(path, errors):
        with suppress(ValueError):
            yield number, json.loads(text)


def whole_lines(path: Path, errors: str = "strict") -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text) of every complete line; nothing if the file is missing.

    `errors`: how to treat what is not UTF-8."""
    try:
        with open(path, encoding="utf-8", errors=errors, newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    yield number, line[:-1]
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_steps(run_dir: Path, process: str) -> Steps:
    """Return the engine steps, sorted by start."""
    path = run_dir / TIMELINE_DIR / f"{process}.steps"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return EMPTY_STEPS
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    whole = len(data) - len(data) % ROW_BYTES
    steps = np.frombuffer(data[:whole], dtype="<i8").astype(np.int64).reshape(-1, 4)
    if (steps < 0).any() or (steps[:, 2:] > COUNT_MAX).any():
        raise ConfigError(f"{path} is damaged: a step has a time or count out of range")
    steps[:, 1] = np.maximum(steps[:, 0], steps[:, 1])
    return steps[np.argsort(steps[:, 0], kind="stable")]


def merge_rows(steps: Iterable[Steps]) -> Steps:
    """Return the steps of several engines, one after another."""
    return np.concatenate([EMPTY_STEPS, *steps])


def merge_steps(steps: Iterable[Steps]) -> Intervals:
    """Return the time in which any of these engines was stepping."""
    return merge_intervals(merge_rows(steps)[:, :2], gap_ns=JOIN_NS)


def select_state(spans: Iterable[TimelineSpan], state: str) -> Intervals:
    return merge_intervals((span.start_ns, span.end_ns) for span in spans if span.state == state)


def _parse_span(path: Path, number: int, fields: Any) -> TimelineSpan:
    try:
        return TimelineSpan(
            str(fields["state"]),
            int(fields["start_ns"]),
            int(fields["end_ns"]),
            int(fields.get("step", -1)),
            int(fields.get("version", -1)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}, line {number} is damaged: {error!r}") from error
