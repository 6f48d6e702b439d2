"""laminar view RUN [RUN ...]: show runs on a local page.

Reads   run directories, running or ended
Writes  RUN/facts, where facts are missing or of another version; the terminal
Gives   0 after Ctrl-C; raises ConfigError for a bad run, port or origin, or without the extra

The page's libraries are imported when the runs are open, and by no other command.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import webbrowser
from pathlib import Path
from typing import Any

from laminar.cli.log import show_progress
from laminar.config import ConfigError
from laminar.names import exit_codes
from laminar.run.directory import run_config
from laminar.view.run_data import RunData, open_runs

ORIGIN = r"(?!.*://)[^\s/:]+(:\d{1,5})?"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("view")
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directory; several: side by side"
    )
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1 (default: any)")
    parser.add_argument(
        "--origin",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="address in the browser, if it is another one (ssh -L 8000:127.0.0.1:PORT: "
        "localhost:8000); may be repeated",
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.set_defaults(function=run_view)


def run_view(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    check_addresses(arguments.port, arguments.origin)
    for run in arguments.runs:
        run_config(run)
    runs = open_runs(arguments.runs, show_progress)
    try:
        asyncio.run(_serve(runs, arguments))
    except KeyboardInterrupt:
        pass
    return exit_codes.COMPLETE


def check_addresses(port: int, origins: list[str]) -> None:
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port {port}: give a port from 1 to 65535, or 0 for any that is free")
    for origin in origins:
        if not re.fullmatch(ORIGIN, origin):
            raise ConfigError(f"--origin {origin}: give HOST:PORT, such as localhost:8000")


async def _serve(runs: list[RunData], arguments: argparse.Namespace) -> None:
    from laminar.view.page import make_page
    from laminar.view.server import PageServer

    server = PageServer(lambda: make_page(runs), port=arguments.port, origins=arguments.origin)
    print(f"open {server.access.address}\nCtrl-C ends the page; runs are not affected", flush=True)
    if not arguments.no_browser:
        webbrowser.open(server.access.address)
    await server.serve()
