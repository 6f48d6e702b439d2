"""laminar watch RUN: show the panel of `laminar train` for a run started elsewhere.

Reads   RUN/status.json, the holders of the run's lock; at the end the event log
Writes  standard output
Gives   0, whatever the outcome: `laminar train` and summary.json have the run's exit code

Ctrl-C ends the command; the run is not affected by it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from laminar.analysis.report.figures import RunFigures
from laminar.analysis.report.summary import summarize_figures
from laminar.config import ConfigError
from laminar.coordinator.restarts import GiveUp
from laminar.core.state.failures import FailureKind
from laminar.core.state.statuses import Phase
from laminar.events.base import COORDINATOR
from laminar.launch.panel import ProgressPanel
from laminar.launch.terminal import Terminal
from laminar.launch.train import summary_lines
from laminar.names import exit_codes
from laminar.run.command_line import shell_command
from laminar.run.directory import read_status, run_config
from laminar.run.lock import holders

POLL_S = 0.25
ALIVE_S = 2.0  #: interval of the check for live processes of the run


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("watch")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.set_defaults(function=run_watch)


def run_watch(arguments: argparse.Namespace) -> int:
    """Show the run until it has ended or has no live process."""
    run_dir: Path = arguments.run
    run_config(run_dir)
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
        console.print_lines(
            [f"the run continues; `{shell_command('watch', run_dir)}` shows it again"]
        )
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
