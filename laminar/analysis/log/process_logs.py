"""Log lines of the processes of a run, in a form that can be merged with the events.

Reads   RUN/logs/attempt_*/PROCESS.jsonl
Gives   LogLine, log_lines: of all processes and attempts; read_machines: each node's machine
Raises  ConfigError for a file that cannot be read

Lines truncated by a crash or a full disk are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from laminar.analysis.log.timeline import left_out, read_json_lines
from laminar.run.directory import LOGS_DIR, list_parts

MACHINE = "machine"  #: name of the line in which a node describes its machine
OWN_KEYS = ("run", "process", "timestamp", "level", "event", "event_seq")


class LogLine(NamedTuple):
    """Log line of one process."""

    unix_ns: int  #: by the clock of the process's machine
    process: str
    event_seq: int  #: event that caused the line; 0 if there is none
    level: str
    name: str
    fields: dict[str, Any]  #: remaining fields


def log_lines(run_dir: Path, process: str = "*") -> Iterator[LogLine]:
    """Yield the log lines of processes file by file, attempt by attempt."""
    for newest in _list_log_files(run_dir, process):
        for path in list_parts(newest):
            yield from _read_lines(path)


def read_machines(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the machine of each node, as its latest start logged it.

    Nodes whose log has lost its beginning are left out.
    """
    said = (line for line in log_lines(run_dir, "node-*") if line.name == MACHINE)
    return {line.process: line.fields for line in sorted(said, key=lambda line: line.unix_ns)}


def cut_logs(run_dir: Path) -> list[str]:
    """Return the log files whose first lines were removed because the files grew large."""
    return [
        f"{path.parent.name}/{path.name}" for path in _list_log_files(run_dir) if left_out(path)
    ]


def _list_log_files(run_dir: Path, process: str = "*") -> list[Path]:
    return sorted((run_dir / LOGS_DIR).glob(f"attempt_*/{process}.jsonl"))


def _read_lines(path: Path) -> Iterator[LogLine]:
    for _, found in read_json_lines(path, errors="replace"):
        try:
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
