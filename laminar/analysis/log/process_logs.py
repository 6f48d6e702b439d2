"""What the processes of a run wrote into their logs, as lines that can be placed along the events.

Reads   RUN/logs/attempt_*/PROCESS.jsonl
Gives   LogLine, log_lines: of all processes and attempts; machines: what each node runs on
Raises  ConfigError for a file that cannot be read

A line that a crash or a full disk cut short is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from laminar.analysis.log.timeline import left_out
from laminar.config import ConfigError
from laminar.run.directory import LOGS_DIR, older_parts

MACHINE = "machine"  #: the line in which a node says what it runs on
OWN_KEYS = ("run", "process", "timestamp", "level", "event", "event_seq")


class LogLine(NamedTuple):
    """One happening, as its process saw it."""

    unix_ns: int  #: by the clock of the process's machine
    process: str
    event_seq: int  #: of the event that caused it, 0 where it belongs to none
    level: str
    name: str
    fields: dict[str, Any]  #: everything else


def log_lines(run_dir: Path) -> Iterator[LogLine]:
    """File by file, attempt by attempt."""
    for newest in _list_log_files(run_dir):
        for path in [*(path for _, path in older_parts(newest)), newest]:
            yield from _read_lines(path)


def read_machines(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The machines by node, as each said when it started last; none in a log that has lost its
    beginning."""
    files = sorted((run_dir / LOGS_DIR).glob("attempt_*/node-*.jsonl"))
    said = [
        line
        for newest in files
        for path in [*(path for _, path in older_parts(newest)), newest]
        for line in _read_lines(path)
        if line.name == MACHINE
    ]
    return {line.process: line.fields for line in sorted(said, key=lambda line: line.unix_ns)}


def cut_logs(run_dir: Path) -> list[str]:
    """Files whose first lines are gone, because they grew large."""
    return [
        f"{path.parent.name}/{path.name}" for path in _list_log_files(run_dir) if left_out(path)
    ]


def _list_log_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / LOGS_DIR).glob("attempt_*/*.jsonl"))


def _read_lines(path: Path) -> Iterator[LogLine]:
    try:
        with open(path, errors="replace") as lines:
            yield from _parse_lines(lines)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse_lines(lines: Iterable[str]) -> Iterator[LogLine]:
    for line in lines:
        try:
            found = json.loads(line)
            time = datetime.fromisoformat(found["timestamp"])
            yield LogLine(
                int(time.timestamp() * 1e6) * 1_000,
                str(found["process"]),
                int(found.get("event_seq", 0)),
                str(found["level"]),
                str(found["event"]),
                {key: value for key, value in found.items() if key not in OWN_KEYS},
            )
        except (ValueError, KeyError, TypeError):
            continue
