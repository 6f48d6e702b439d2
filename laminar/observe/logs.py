"""Structured logs: one JSON line per happening, one file per process.

Reads   nothing
Writes  RUN/logs/attempt_N/PROCESS.jsonl

Every line has run, process and time; what belongs to a command also has the sequence number of the
event that caused it, and trajectory or version ids where they apply, so that lines of all processes
can be merged along the event log.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TextIO

import structlog


def configure(run_dir: Path, run: str, process: str, level: str = "info") -> None:
    """Send this process's log lines to its file; call once at start."""
    directory = run_dir / "logs" / "latest"
    directory.mkdir(parents=True, exist_ok=True)

    def name_process(logger: Any, method: str, line: dict[str, Any]) -> dict[str, Any]:
        """Not through context variables: callbacks of the event loop do not inherit them."""
        return {"run": run, "process": process, **line}

    stream: TextIO = open(directory / f"{process}.jsonl", "a", buffering=1)  # noqa: SIM115
    structlog.configure(
        processors=[
            name_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )


def new_attempt(run_dir: Path) -> Path:
    """Make logs/attempt_N and point logs/latest at it."""
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for entry in logs.glob("attempt_*") if entry.is_dir())
    (logs / f"attempt_{number}").mkdir()
    link = logs / "latest.new"
    link.symlink_to(f"attempt_{number}")
    link.replace(logs / "latest")
    return logs / f"attempt_{number}"


def get_logger() -> Any:
    return structlog.get_logger()
