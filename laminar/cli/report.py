"""laminar report RUN [RUN ...]: report the figures of runs, as a page or as JSON.

Reads   run directories, running or ended
Writes  RUN/summary.json of each; RUN/report.html, or comparison.html in the first of several
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laminar.analysis.report.page import render_page
from laminar.analysis.report.page_data import PageData, page_data
from laminar.analysis.report.summary import replace_text, summarize_run, write_summary
from laminar.analysis.report.summary_lines import format_headline, list_problems
from laminar.config import ConfigError
from laminar.launch.exit_handling import print_error
from laminar.run.directory import COMPARISON_FILE, REPORT_FILE, run_config
from laminar.tasks.data.decoding import make_decoder

SHARES_SHOWN = 3  #: time shares of a process, the largest first


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report")
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directory; several: side by side"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, no page")
    where = f"the page (RUN/{REPORT_FILE}; of several, {COMPARISON_FILE} in the first)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    parser.set_defaults(function=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Print the report and write its files; docs/metrics.md explains the figures."""
    if arguments.json:
        for run in arguments.runs:
            print(json.dumps(summarize_run(run), indent=2))
        return 0
    runs = [_page_data(run) for run in arguments.runs]
    for data in runs:
        write_summary(data.run_dir, data.summary)
    path = arguments.output or runs[0].run_dir / (COMPARISON_FILE if runs[1:] else REPORT_FILE)
    replace_text(path, render_page(runs))
    for line in [
        *(line for data in runs for line in format_report(data)),
        f"page              {path}",
    ]:
        print(line)
    return 0


def _page_data(run: Path) -> PageData:
    """Load the page's data; without the tokenizer, everything but the samples."""
    decode, why = None, ""
    try:
        decode = make_decoder(run, run_config(run))
    except ConfigError as error:
        why = str(error)
    data = page_data(run, decode)
    if why:
        print_error("laminar", f"the page of {run} shows no responses: {why}")
    return data


def format_report(data: PageData) -> Iterator[str]:
    """Yield the text report: the page without its charts."""
    yield f"{data.name}  ({data.run_dir})"
    shares = data.summary["time_shares"]
    for name, text in [
        *format_headline(data),
        *((n, _format_largest(parts)) for n, parts in shares.items()),
    ]:
        yield f"  {name:<20}{text}"
    for sentence in list_problems(data.summary):
        yield f"  ! {sentence}"
    yield ""


def _format_largest(shares: dict[str, float]) -> str:
    parts: Sequence[tuple[str, float]] = sorted(shares.items(), key=lambda part: -part[1])
    chosen = [(name, share) for name, share in parts[:SHARES_SHOWN] if share >= 0.005]
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in chosen)
