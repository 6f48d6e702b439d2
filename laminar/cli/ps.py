"""laminar ps [RUN]: what the processes of a run do and where they are; or which runs live.

Reads   RUN/status.json, who has a share of the run's lock; RUN/slurm/jobs.json and squeue
Writes  standard output
Gives   0

Any machine that sees the directory will do. That a process lives is told by its lock, what it does
by the coordinator, whose word may be old: its age is shown.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from laminar.cluster.slurm import SlurmTask, list_queued, read_jobs
from laminar.config import ConfigError
from laminar.config.tree import RunConfig
from laminar.core.state.statuses import Phase
from laminar.names import exit_codes
from laminar.run.directory import CONFIG_FILE, STATUS_FILE
from laminar.run.lock import Holder, holders

COMMANDS = ("stop",)
"""Commands that have a share of the lock while they look at a run, and are no process of it."""


def add_parser(subparsers: Any) -> None:
    text = "show the processes of a run, or the runs that live"
    parser = subparsers.add_parser("ps", help=text, description=text)
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path(RunConfig().output_dir),
        metavar="RUN",
        help=f"run directory, or a directory of runs (default {RunConfig().output_dir})",
    )
    parser.set_defaults(function=run_ps)


def run_ps(arguments: argparse.Namespace) -> int:
    """Print one run, or all that live."""
    place: Path = arguments.run
    if (place / CONFIG_FILE).is_file():
        lines = of_run(place)
    elif place.is_dir():
        lines = of_runs(place)
    else:
        raise ConfigError(f"{place} is no directory: name a run, or a directory of runs")
    for line in lines:
        print(line)
    return exit_codes.COMPLETE


def of_runs(place: Path) -> Iterator[str]:
    """The runs in a directory that live, or have jobs in the queue."""
    runs = sorted(path.parent for path in place.glob(f"*/{CONFIG_FILE}"))
    rows = []
    for run in runs:
        living, tasks = _find_holders(run), _list_tasks(run)
        if living or tasks:
            hosts = ", ".join(sorted({holder.host for holder in living}))
            waiting = ", ".join(task.name for task in tasks if not task.nodes)
            rows.append([str(run), *_format_state(read_status(run)), hosts or "-", waiting])
    if rows:
        yield from format_table([["RUN", "PHASE", "STEP", "TOKENS/S", "ON", "QUEUED"], *rows])
    else:
        yield f"no run in {place} lives, of {len(runs)} that are there"


def of_run(run: Path) -> Iterator[str]:
    """One run: how it goes, then its processes and its jobs."""
    status, living = read_status(run), _find_holders(run)
    phase, step, rate = _format_state(status)
    if not living:
        yield f"{run}: no process of it lives; {phase}, step {step}"
    else:
        yield f"{run}: {phase}, step {step}, {rate} tokens/s{_format_age(run)}"
    if status.get("failure"):
        yield f"because: {status['failure']}"
    if living:
        yield from format_table(
            [["PROCESS", "ON", "PID", "DOES"], *_list_processes(status, living)]
        )
    if tasks := _list_tasks(run):
        yield from format_table([["JOB", "STATE", "ON", "BECAUSE"], *tasks])


def _list_processes(status: dict[str, Any], living: Sequence[Holder]) -> Iterator[list[str]]:
    """One row for each process that lives or is awaited; emulated replicas may share one."""
    known: dict[str, int] = status.get("processes", {})
    named = {holder.name: holder for holder in living}
    by_pid = {holder.pid: holder for holder in living}
    for name in sorted({*known, *named}, key=_sort_key):
        holder = named.get(name) or by_pid.get(known.get(name, 0))
        does = _describe_activity(status, name)
        if holder is not None:
            yield [name, holder.host, str(holder.pid), does]
        elif status.get("phase") != Phase.ENDED:
            yield [name, "-", "-", does or "is gone, or its lock is not seen from this machine"]


def _describe_activity(status: dict[str, Any], name: str) -> str:
    """What the coordinator says that a process does."""
    if name in status.get("awaited", []):
        return "lost, and awaited"
    if name in status.get("silent_nodes", []):
        return "silent"
    if name.startswith("trainer-"):
        return str(status.get("trainer", ""))
    if (replica := status.get("replicas", {}).get(name)) is not None:
        said = f"{replica['doing']}, " if replica["doing"] else ""
        begins = f", {replica['resetting']} in reset" if replica["resetting"] else ""
        return (
            f"{said}version {replica['version']}, {replica['running']} running, "
            f"{replica['waiting']} waiting{begins}"
        )
    return ""


def _sort_key(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Who runs the others comes first, and rollout-10 after rollout-9."""
    first = ("train", "serve", "coordinator", "node", "store", "trainer", "relay")
    role = name.partition("-")[0]
    parts = name.replace(".", "-").split("-")
    numbers = [(int(part), "") if part.isdigit() else (0, part) for part in parts]
    return first.index(role) if role in first else len(first), numbers


def _format_state(status: dict[str, Any]) -> tuple[str, str, str]:
    """Phase, step and tokens per second."""
    if not status:
        return "not begun", "-", "-"
    phase = str(status.get("pause") or status["phase"])
    total = f"/{status['total_steps']}" if status["total_steps"] else ""
    return phase, f"{status['step']}{total}", f"{status['tokens_per_s']:.0f}"


def read_status(run: Path) -> dict[str, Any]:
    """What the coordinator said last; nothing before it has said anything."""
    try:
        found: dict[str, Any] = json.loads((run / STATUS_FILE).read_bytes())
        return found
    except (OSError, ValueError):
        return {}


def _format_age(run: Path) -> str:
    """How old that is, by the clock of the file system; empty: just now."""
    try:
        age_s = time.time() - (run / STATUS_FILE).stat().st_mtime
    except OSError:
        return ""
    return f", as of {age_s:.0f} s ago" if age_s >= 2 else ""


def _find_holders(run: Path) -> list[Holder]:
    return [holder for holder in holders(run) if holder.name not in COMMANDS]


def _list_tasks(run: Path) -> list[SlurmTask]:
    """The jobs of a run that was submitted, as far as they have not ended."""
    jobs = read_jobs(run)
    return list_queued(jobs.ids) if jobs is not None else []


def format_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns, each as wide as its widest word."""
    all_rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    for row in all_rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
