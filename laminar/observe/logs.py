"""Structured logs: one JSON line per log entry, one file per process.

Reads   nothing
Writes  RUN/logs/attempt_N/PROCESS.jsonl, by the process's telemetry thread

Every line has run, process and time. Lines about a command also have the sequence number of the
event that caused it, and trajectory or version ids where they apply, so that lines of all processes
can be merged along the event log.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import structlog

from laminar.observe.files import GrowingFile
from laminar.observe.telemetry import Outlet, Telemetry
from laminar.run.directory import LOGS_DIR
from laminar.run.renames import rename

_LevelFilter = structlog.make_filtering_bound_logger(logging.INFO)


class _LineLogger:
    """The sink of structlog: each message, of any level, is one line for the outlet."""

    def __init__(self, lines: Outlet[bytes]) -> None:
        self._lines = lines

    def msg(self, message: str) -> None:
        self._lines.put(message.encode(errors="replace") + b"\n")

    debug = info = warning = error = critical = msg


def configure_logging(run_dir: Path, run: str, process: str) -> Telemetry:
    """Send this process's log lines to its file; call once at start.

    Items that the process's telemetry loses are reported there.
    """
    telemetry = Telemetry()
    lines = _add_log_outlet(run_dir, process, telemetry)
    structlog.configure(
        processors=_make_processors(run, process),
        wrapper_class=_LevelFilter,
        logger_factory=lambda *_: _LineLogger(lines),
        cache_logger_on_first_use=True,
    )
    telemetry.tell_losses(_log_losses)
    return telemetry


def make_logger(run_dir: Path, run: str, actor: str, telemetry: Telemetry) -> Any:
    """Return the logger of one of several actors of this process, with a separate file."""
    return structlog.wrap_logger(
        _LineLogger(_add_log_outlet(run_dir, actor, telemetry)),
        processors=_make_processors(run, actor),
        wrapper_class=_LevelFilter,
    )


def _add_log_outlet(run_dir: Path, name: str, telemetry: Telemetry) -> Outlet[bytes]:
    file = GrowingFile(run_dir, f"{LOGS_DIR}/latest/{name}.jsonl", in_parts=True)
    return telemetry.add_outlet("log", file.write)


def _make_processors(run: str, process: str) -> list[Any]:
    def name_process(logger: Any, method: str, line: dict[str, Any]) -> dict[str, Any]:
        """Add the process to a line.

        Callbacks of the event loop do not inherit context variables, so these are not used.
        """
        return {"run": run, "process": process, **line}

    return [
        name_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def _log_losses(outlet: str, lost: int, reason: str) -> None:
    get_logger().warning("telemetry-lost", outlet=outlet, lost=lost, reason=reason)


def create_attempt(run_dir: Path) -> Path:
    """Create logs/attempt_N and point logs/latest at it."""
    logs = run_dir / LOGS_DIR
    logs.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for entry in logs.glob("attempt_*") if entry.is_dir())
    (logs / f"attempt_{number}").mkdir()
    link = logs / "latest.new"
    link.symlink_to(f"attempt_{number}")
    rename(link, logs / "latest", durable=False)
    return logs / f"attempt_{number}"


def get_logger() -> Any:
    return structlog.get_logger()
