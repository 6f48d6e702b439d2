"""Structured logs: one JSON line per happening, one file per process.

Reads   nothing
Writes  RUN/logs/attempt_N/PROCESS.jsonl, by the process's telemetry thread

Every line has run, process and time; what belongs to a command also has the sequence number of the
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
from laminar.rundir import LOGS_DIR


class _LineLogger:
    """What structlog writes to: every level is one line for the outlet."""

    def __init__(self, lines: Outlet[bytes]) -> None:
        self._lines = lines

    def msg(self, message: str) -> None:
        self._lines.put(message.encode(errors="replace") + b"\n")

    debug = info = warning = error = critical = msg


def configure(run_dir: Path, run: str, process: str, level: str = "info") -> Telemetry:
    """Send this process's log lines to its file; call once at start. What the telemetry of the
    process loses is reported there."""

    def name_process(logger: Any, method: str, line: dict[str, Any]) -> dict[str, Any]:
        """Not through context variables: callbacks of the event loop do not inherit them."""
        return {"run": run, "process": process, **line}

    telemetry = Telemetry()
    file = GrowingFile(run_dir, f"{LOGS_DIR}/latest/{process}.jsonl", in_parts=True)
    lines = telemetry.outlet("log", file.write)
    structlog.configure(
        processors=[
            name_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=lambda *_: _LineLogger(lines),
        cache_logger_on_first_use=True,
    )
    telemetry.tell_losses(_say_losses)
    return telemetry


def _say_losses(outlet: str, lost: int, reason: str) -> None:
    get_logger().warning("telemetry-lost", outlet=outlet, lost=lost, reason=reason)


def new_attempt(run_dir: Path) -> Path:
    """Make logs/attempt_N and point logs/latest at it."""
    logs = run_dir / LOGS_DIR
    logs.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for entry in logs.glob("attempt_*") if entry.is_dir())
    (logs / f"attempt_{number}").mkdir()
    link = logs / "latest.new"
    link.symlink_to(f"attempt_{number}")
    link.replace(logs / "latest")
    return logs / f"attempt_{number}"


def get_logger() -> Any:
    return structlog.get_logger()
