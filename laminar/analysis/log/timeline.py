"""What each process did when, by its own record.

Reads   RUN/timeline/NAME.jsonl (spans) and NAME.steps (engine steps), all times unix ns
Gives   Span, and engine steps as int64 arrays [n, 4] of (start, end, sequences, tokens); left_out
Raises  ConfigError for a damaged file; entries that a crash or a full disk cut short are left out

A restarted process appends to the file of the one before it. Of a file of spans that grew large
only the newest parts are there. Beyond the first two million engine steps those of half a second
are one row, with 0 sequences, for each time without a pause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.log.intervals import Intervals, merge_intervals
from laminar.config import ConfigError
from laminar.run.directory import TIMELINE_DIR, older_parts

ROW_BYTES = 4 * 8
JOIN_NS = 20_000_000
"""An engine whose next step begins within 20 ms has not stopped: commands pass between steps."""

Steps = NDArray[np.int64]

EMPTY_STEPS: Steps = np.zeros((0, 4), dtype=np.int64)


class Span(NamedTuple):
    """One thing that a process did."""

    state: str
    start_ns: int
    end_ns: int
    step: int  #: -1 where it belongs to none
    version: int  #: -1 where there is none


def read_spans(run_dir: Path, process: str) -> list[Span]:
    """The spans in the order in which they ended; none when the process never wrote one."""
    newest = run_dir / TIMELINE_DIR / f"{process}.jsonl"
    spans = []
    for path in [*(path for _, path in older_parts(newest)), newest]:
        found = ((number, _parse_fields(line)) for number, line in whole_lines(path))
        spans += [
            _parse_span(path, number, fields) for number, fields in found if fields is not None
        ]
    return spans


def left_out(newest: Path) -> bool:
    """Whether older parts of this file of a log or timeline are gone."""
    parts = older_parts(newest)
    return bool(parts) and parts[0][0] > 1


def cut_timelines(run_dir: Path) -> list[str]:
    """Processes whose first spans are gone."""
    files = sorted((run_dir / TIMELINE_DIR).glob("*.jsonl"))
    return [path.name.removesuffix(".jsonl") for path in files if left_out(path)]


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of every line that has its end; none when there is no file."""
    try:
        with open(path, newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    yield number, line[:-1]
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_steps(run_dir: Path, process: str) -> Steps:
    """Engine steps by start."""
    path = run_dir / TIMELINE_DIR / f"{process}.steps"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return EMPTY_STEPS
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    whole = len(data) - len(data) % ROW_BYTES
    steps = np.frombuffer(data[:whole], dtype="<i8").astype(np.int64).reshape(-1, 4)
    if (steps[:, 1] < steps[:, 0]).any() or (steps < 0).any():
        raise ConfigError(f"{path} is damaged: a step ends before it begins or counts less than 0")
    return steps[np.argsort(steps[:, 0], kind="stable")]


def merge_steps(steps: Iterable[Steps]) -> Intervals:
    """The time in which any of these engines was stepping."""
    return merge_intervals(np.concatenate([EMPTY_STEPS, *steps])[:, :2], gap_ns=JOIN_NS)


def select_state(spans: Iterable[Span], state: str) -> Intervals:
    return merge_intervals((span.start_ns, span.end_ns) for span in spans if span.state == state)


def _parse_fields(line: str) -> Any:
    """None for a torn line: what is left of an object is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _parse_span(path: Path, number: int, fields: Any) -> Span:
    try:
        return Span(
            str(fields["state"]),
            int(fields["start_ns"]),
            int(fields["end_ns"]),
            int(fields.get("step", -1)),
            int(fields.get("version", -1)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}, line {number} is damaged: {error!r}") from error
