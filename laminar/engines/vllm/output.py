"""Output of the processes of a vLLM, and the reason for a failure in their own words.

Reads   records of vLLM's loggers, in the processes that fail; the file that they print to
Writes  that file: standard output and error of the replica and of all processes that it starts
Gives   ProcessOutput

vLLM tells the replica that its core has failed and leaves the reason to the output, which a hundred
lines of tracebacks make unreadable on a terminal. So the output is a file of the replica's, and the
process that fails adds one line to it, by a filter of vLLM's loggers: unlike a handler, it stays
when the core reconfigures its logging. A spawned core gets the filter by importing our worker's
module.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from laminar.observe.telemetry import output_to

LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
FATAL_PREFIXES = ("EngineCore failed to start", "EngineCore encountered", "WorkerProc failed")
"""Prefixes of messages with which a process of vLLM ends; others fail at one call and live."""
FAILURE_MARK = b"laminar: failed by "


def print_failures() -> None:
    """Have this process, and its forks, print why it fails in a line with FAILURE_MARK."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if _print_failure not in logger.filters:
            logger.addFilter(_print_failure)


def _print_failure(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and str(record.msg).startswith(FATAL_PREFIXES):
        os.write(2, FAILURE_MARK + describe_error(error).encode(errors="replace") + b"\n")
    return True


def describe_error(error: BaseException) -> str:
    """Return the type and the first line of an error, which may be pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return type(error).__name__ + (f": {lines[0][:400]}" if lines else "")


class ProcessOutput:
    """Output of one replica's processes; earlier processes of that name may have begun the file."""

    def __init__(self, path: Path | None) -> None:
        """Redirect the output to a file; None: leave it, and find no reasons."""
        self._path, self._begin = path, 0
        if path is not None:
            output_to(path)
            self._begin = path.stat().st_size

    def find_failure(self) -> str:
        """Return why a process failed, a worker's reason before the core's, else where to look."""
        if self._path is None:
            return "the reason is in this replica's output"
        with open(self._path, "rb") as file:
            file.seek(self._begin)
            said = [line for line in file if line.startswith(FAILURE_MARK)]
        if not said:
            return f"its output is in {self._path}"
        return said[0].removeprefix(FAILURE_MARK).decode(errors="replace").strip()
