"""laminar tail RUN: print the logs of a run's processes, merged by time.

Reads   RUN/logs: the newest attempt (*.jsonl; *.log, output of engines and reward functions), and
        slurm/*.log, output of the jobs of the run
Writes  standard output, lines: time (UTC), process, message
Gives   0, also when Ctrl-C ends the following

For the event log see laminar log. With -f it also follows files that are created or rotated
meanwhile, and later attempts. Works on any machine that sees the directory.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from laminar.config import ConfigError
from laminar.names import exit_codes
from laminar.run.directory import LOGS_DIR, run_config

LINES = 40  #: default number of lines at the start
LAST_BYTES = 256 << 10  #: bytes read from the end of each file for these lines
POLL_S = 0.25
ENDINGS = (".jsonl", ".reward.log", ".engine.log", ".log")
"""Endings of log file names, after the name of the process."""
_HEAD = ("run", "process", "timestamp", "level", "event", "exception")


class PrintedLine(NamedTuple):
    """Line to print, with its sort key."""

    unix_s: float
    text: str


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tail")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only of these, such as trainer-0 or 'rollout-*'"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="follow until Ctrl-C")
    parser.add_argument(
        "-n",
        "--lines",
        type=int,
        default=LINES,
        metavar="N",
        help=f"number of lines to start with (default {LINES})",
    )
    parser.set_defaults(function=run_tail)


def run_tail(arguments: argparse.Namespace) -> int:
    """Print the last lines; with -f, also new ones."""
    run_config(arguments.run)
    logs = RunLogs(arguments.run, arguments.names)
    found = sorted(logs.read_lines())
    if arguments.names and not logs.names and not arguments.follow:
        raise ConfigError(
            f"no log of {arguments.run} is called {', '.join(arguments.names)}: there are "
            f"{', '.join(sorted({*map(name_of, files_of(arguments.run))})) or 'none'}"
        )
    _print_lines(found[-arguments.lines :] if arguments.lines > 0 else [])
    try:
        while arguments.follow:
            time.sleep(POLL_S)
            _print_lines(sorted(logs.read_lines()))
    except KeyboardInterrupt:
        pass
    return exit_codes.COMPLETE


def _print_lines(lines: Iterable[PrintedLine]) -> None:
    for line in lines:
        print(line.text)
    print(end="", flush=True)


class RunLogs:
    """Logs of a run, with the position reached in each."""

    def __init__(self, run_dir: Path, wanted: Sequence[str]) -> None:
        self._run_dir, self._wanted = run_dir, wanted
        self._files: dict[Path, LogFile] = {}
        self._begun = False

    @property
    def names(self) -> set[str]:
        """Processes and jobs whose logs are read."""
        return {name_of(path) for path in self._files}

    def read_lines(self) -> Iterator[PrintedLine]:
        """Yield the lines since the last call; at first, those at the end of the files."""
        for path in files_of(self._run_dir):
            name = name_of(path)
            wanted = not self._wanted or any(fnmatch.fnmatch(name, w) for w in self._wanted)
            if wanted and path not in self._files:
                self._files[path] = LogFile(path, LAST_BYTES if not self._begun else None)
        self._begun = True
        for file in self._files.values():
            yield from file.read_lines()


class LogFile:
    """Growing file that may be rotated."""

    def __init__(self, path: Path, last_bytes: int | None) -> None:
        """Start `last_bytes` before the end, or at the beginning if None."""
        self._path, self._name = path, name_of(path)
        self._file: BinaryIO | None = None
        self._rest = b""
        if last_bytes is not None and self._open():
            assert self._file is not None
            size = os.fstat(self._file.fileno()).st_size
            self._file.seek(max(size - last_bytes, 0))
            if size > last_bytes:
                self._file.readline()  # an incomplete line

    def read_lines(self) -> Iterator[PrintedLine]:
        """Yield the new complete lines."""
        if self._file is None and not self._open():
            return
        assert self._file is not None
        yield from self._read(self._file)
        if self._set_aside():
            yield from self._read(self._file)  # lines written before the rotation
            self._file.close()
            self._file = None
            yield from self.read_lines()

    def _open(self) -> bool:
        """Open the file; return False while it is missing, during a rotation."""
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return False
        return True

    def _set_aside(self) -> bool:
        assert self._file is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _read(self, file: BinaryIO) -> Iterator[PrintedLine]:
        *whole, self._rest = (self._rest + file.read()).split(b"\n")
        written_s = os.fstat(file.fileno()).st_mtime
        for line in whole:
            text = line.decode(errors="replace")
            if self._path.suffix == ".jsonl":
                yield parse_line(text, self._name, written_s)
            elif text.strip():
                yield PrintedLine(written_s, _format_row(written_s, self._name, text))


def parse_line(text: str, name: str, written_s: float) -> PrintedLine:
    """Parse a line of a process's log; a truncated line is shown as it is."""
    try:
        found = json.loads(text)
        unix_s = datetime.fromisoformat(found["timestamp"]).timestamp()
        fields = [f"{key}={value}" for key, value in found.items() if key not in _HEAD]
        level = [] if found["level"] == "info" else [str(found["level"]).upper()]
        words = " ".join([*level, str(found["event"]), *fields])
        trace = str(found.get("exception", ""))
        return PrintedLine(
            unix_s, "\n    ".join([_format_row(unix_s, name, words), *trace.splitlines()])
        )
    except (ValueError, KeyError, TypeError):
        return PrintedLine(written_s, _format_row(written_s, name, text))


def _format_row(unix_s: float, name: str, words: str) -> str:
    when = datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%S.%f")[:-3]
    return f"{when}  {name:<14} {words}"


def files_of(run_dir: Path) -> list[Path]:
    """Return the logs of the newest attempt, and of the jobs."""
    logs = run_dir / LOGS_DIR
    newest = (logs / "latest").resolve()
    return sorted(
        path
        for directory in (newest, logs / "slurm")
        for pattern in ("*.jsonl", "*.log")
        for path in directory.glob(pattern)
    )


def name_of(path: Path) -> str:
    """Return the name of the process or job that wrote this log."""
    ending = next((end for end in ENDINGS if path.name.endswith(end)), "")
    return path.name.removesuffix(ending)
