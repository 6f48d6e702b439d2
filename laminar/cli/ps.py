"""laminar ps [RUN]: list the processes of a run with place and activity, or the live runs.

Reads   RUN/status.json, the holders of the run's lock; RUN/slurm/jobs.json and squeue
Writes  standard output
Gives   0

Works on any machine that sees the directory. The lock shows whether a process lives; its activity
comes from the coordinator's status, whose age is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from laminar.cluster.slurm import SlurmTask, list_queued, read_jobs
from laminar.config import ConfigError
from laminar.config.tree import RunConfig
from laminar.core.state.statuses import Phase
from laminar.names import exit_codes
from laminar.names.roles import ROLE_TABLE
from laminar.observe.status import measure_status_age
from laminar.run.directory import CONFIG_FILE, read_status
from laminar.run.lock import Holder, list_processes

AGE_S = 3.0  #: the age of a status above which it is shown; a coordinator writes more often


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("ps")
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
    """Print one run, or all live runs."""
    place: Path = arguments.run
    if (place / CONFIG_FILE).is_file():
        lines = of_run(place)
    elif place.is_dir():
        lines = of_runs(place)
    else:
        raise ConfigError(f"{place} is not a directory: name a run, or a directory of runs")
    for line in lines:
        print(line)
    return exit_codes.COMPLETE


def of_runs(place: Path) -> Iterator[str]:
    """Yield a table of the runs in a directory that are live or have jobs in the queue."""
    runs = sorted(path.parent for path in place.glob(f"*/{CONFIG_FILE}"))
    rows = []
    for run in runs:
        living, tasks = list_processes(run), _list_tasks(run)
        if living or tasks:
            hosts = ", ".join(sorted({holder.host for holder in living}))
            waiting = ", ".join(task.name for task in tasks if not task.nodes)
            rows.append([str(run), *_format_state(read_status(run)), hosts or "-", waiting])
    if rows:
        yield from format_table([["RUN", "PHASE", "STEP", "TOKENS/S", "ON", "QUEUED"], *rows])
    else:
        yield f"no live run in {place}, of {len(runs)} there"


def of_run(run: Path) -> Iterator[str]:
    """Yield the state of one run, then its processes and jobs."""
    status, living = read_status(run), list_processes(run)
    phase, step, rate = _format_state(status)
    if not living:
        yield f"{run}: no live process; {phase}, step {step}"
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
    """Yield a row per live or awaited process; emulated replicas may share one process."""
    known: dict[str, int] = status.get("processes", {})
    named = {holder.name: holder for holder in living}
    by_pid = {holder.pid: holder for holder in living}
    for name in sorted({*known, *named}, key=_sort_key):
        holder = named.get(name) or by_pid.get(known.get(name, 0))
        does = _describe_activity(status, name)
        if holder is not None:
            yield [name, holder.host, str(holder.pid), does]
        elif status.get("phase") != Phase.ENDED:
            yield [name, "-", "-", does or "is gone, or its lock is not visible from this machine"]


def _describe_activity(status: dict[str, Any], name: str) -> str:
    """Describe the activity of a process as reported by the coordinator."""
    if name in status.get("awaited", []):
        return "lost, restart pending"
    if name in status.get("silent_nodes", []):
        return "silent"
    if name.startswith("trainer-"):
        return str(status.get("trainer", ""))
    if (replica := status.get("replicas", {}).get(name)) is not None:
        said = f"{replica['doing']}, " if replica["doing"] else ""
        return (
            f"{said}version {replica['version']}, {replica['running']} running, "
            f"{replica['waiting']} waiting"
        )
    if (host := status.get("hosts", {}).get(name)) is not None:
        return f"{host['sessions']} sessions, {host['sampled']} of them in an engine"
    return ""


def _sort_key(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key: supervising processes first, rollout-9 before rollout-10."""
    first = ["train", "serve", *ROLE_TABLE]
    role = name.partition("-")[0]
    parts = name.replace(".", "-").split("-")
    numbers = [(int(part), "") if part.isdigit() else (0, part) for part in parts]
    return first.index(role) if role in first else len(first), numbers


def _format_state(status: dict[str, Any]) -> tuple[str, str, str]:
    """Return phase, step and tokens per second."""
    if not status:
        return "not started", "-", "-"
    phase = str(status.get("pause") or status["phase"])
    total = f"/{status['total_steps']}" if status["total_steps"] else ""
    return phase, f"{status['step']}{total}", f"{status['tokens_per_s']:.0f}"


def _format_age(run: Path) -> str:
    """Return the age of the status by the file system's clock; empty if recent."""
    age_s = measure_status_age(run)
    return f", as of {age_s:.0f} s ago" if age_s >= AGE_S else ""


def _list_tasks(run: Path) -> list[SlurmTask]:
    """Return the unfinished jobs of a submitted run."""
    jobs = read_jobs(run)
    return list_queued(jobs.ids) if jobs is not None else []


def format_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows whose columns are as wide as their widest cell."""
    all_rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    for row in all_rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
