"""What the processes of a run wrote into their logs, as lines that can be placed along the events.

Reads   RUN/logs/attempt_*/PROCESS.jsonl
Gives   LogLine, log_lines: of all processes and attempts
Raises  ConfigError for a file that cannot be read

A line that a crash or a full disk cut short is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from laminar.config import ConfigError
from laminar.rundir import LOGS_DIR

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
    for path in sorted((run_dir / LOGS_DIR).glob("attempt_*/*.jsonl")):
        yield from _lines(path)


def _lines(path: Path) -> Iterator[LogLine]:
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for line in text.splitlines():
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
