"""laminar report RUN: work out a run's figures, write summary.json, print it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from laminar.analysis.report import summarize


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="write and print the summary of a run")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.set_defaults(function=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """The keys are explained in docs/metrics.md."""
    print(json.dumps(summarize(arguments.run), indent=2))
    return 0
