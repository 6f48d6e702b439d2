"""laminar status RUN: how a run is doing, and who waits for which event from whom.

Reads   RUN/status.json, or the event log without it; the holders of the run's lock
Writes  standard output
Gives   0, whatever the outcome: `laminar train` and summary.json have the run's exit code

With --follow it shows the panel until the run ends. Ctrl-C ends the command; the run is not
affected by it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laminar.analysis.log.run_log import replay_log
from laminar.analysis.report.figures import RunFigures
from laminar.analysis.report.summary import summarize_figures
from laminar.cli.ps import format_table
from laminar.config import ConfigError
from laminar.coordinator.restarts import GiveUp
from laminar.core.state.failures import FailureKind
from laminar.core.state.statuses import Phase
from laminar.events.base import COORDINATOR
from laminar.launch.panel import ProgressPanel
from laminar.launch.terminal import Terminal
from laminar.launch.train import summary_lines
from laminar.names import exit_codes
from laminar.observe.status import StatusFigures, measure_status_age
from laminar.run.command_line import shell_command
from laminar.run.directory import read_status, run_config
from laminar.run.lock import holders

POLL_S = 0.25
ALIVE_S = 2.0  #: interval of the check for live processes of the run
WIDTH = 200  #: of the output, without a terminal
WHAT_MAX = 60  #: most characters of the awaited thing in the table


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("status")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--follow", action="store_true", help="show the panel until the run ends")
    shown.add_argument("--json", action="store_true", help="print status.json, and its age")
    parser.set_defaults(function=run_status)


def run_status(arguments: argparse.Namespace) -> int:
    """Show the run once, or until it has ended or has no live process."""
    run_dir: Path = arguments.run
    run_config(run_dir)
    if arguments.follow:
        return _follow_run(run_dir)
    status, age_s = read_status(run_dir), measure_status_age(run_dir)
    logged = not status
    if logged:
        status, age_s = _replay_status(run_dir), 0.0
    live = len(holders(run_dir))
    if arguments.json:
        print(json.dumps({**status, "age_seconds": age_s, "live_processes": live}))
        return exit_codes.COMPLETE
    console = Terminal()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(ProgressPanel(run_dir, console).build_panel(status))
    console.print_lines(_format_state(status, age_s, live, logged=logged))
    console.flush_output()
    return exit_codes.PIPE_CLOSED if console.gone else exit_codes.COMPLETE


def _replay_status(run_dir: Path) -> dict[str, Any]:
    """Return the status at the end of the event log."""
    figures = StatusFigures()
    state = replay_log(run_dir, figures).machine.state
    return figures.build_status(state, state.time_ns)


def _format_state(
    status: dict[str, Any], age_s: float, live: int, *, logged: bool
) -> Iterator[str]:
    """Yield how far the figures can be trusted, and the table of waits."""
    if logged:
        yield "from the event log: the run has no status.json"
    if status["phase"] != Phase.ENDED and not live:
        yield "no process of the run is alive; these are the last figures"
    if status["failure"]:
        yield f"because: {status['failure']}"
    if not (waits := status.get("waits")):
        return
    now_s = status["seconds"] + (age_s if live else 0.0)
    rows = [["WAITS", "FOR", "FROM", "WHAT", "SINCE", "LEFT", "THEN"]]
    for wait in waits:
        left = "-" if wait["until"] is None else f"{wait['until'] - now_s:.0f} s"
        since, what = f"{now_s - wait['since']:.0f} s", wait["what"]
        what = what if len(what) <= WHAT_MAX else f"{what[: WHAT_MAX - 3]}..."
        names = [wait["waiter"], wait["event"], wait["owner"]]
        rows.append([*names, what, since, left, wait["then"]])
    yield ""
    yield from format_table(rows)
    if (more := status["waits_total"] - len(waits)) > 0:
        yield f"and {more} more"


def _follow_run(run_dir: Path) -> int:
    """Show the panel until the run has ended or has no live process."""
    console = Terminal()
    try:
        with ProgressPanel(run_dir, console, attached=True) as progress:
            alive_at = 0.0
            while read_status(run_dir).get("phase") != Phase.ENDED and not console.gone:
                progress.update()
                time.sleep(POLL_S)
                if (now := time.monotonic()) - alive_at >= ALIVE_S:
                    if not holders(run_dir):
                        break
                    alive_at = now
    except KeyboardInterrupt:
        again = shell_command("status", "--follow", run_dir)
        console.print_lines([f"the run continues; `{again}` shows it again"])
        return exit_codes.COMPLETE
    console.print_lines(_format_end(run_dir))
    console.flush_output()
    return exit_codes.PIPE_CLOSED if console.gone else exit_codes.COMPLETE


def _format_end(run_dir: Path) -> list[str]:
    """Return the last lines, as in `laminar train`; a killed run has no recorded reason."""
    try:
        run = RunFigures(run_dir)
    except ConfigError as error:
        return [f"no process of the run is alive, and it has no summary: {error}"]
    over = GiveUp(run.state.run.exit_code, run.state.run.failed)
    if run.state.run.phase != Phase.ENDED:
        over = GiveUp.after_failure(FailureKind.CRASHED, COORDINATOR, "all its processes are gone")
    return summary_lines(summarize_figures(run), run_dir, over)
