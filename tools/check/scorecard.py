"""Reliability scorecard: each promise with its target and the latest test result.

Usage: python tools/check/scorecard.py [--rows 1,3,20 | --but 7] [--gate pr|release] [--fresh N]
                                       [--json] [--write]
Prints one table, a row per promise; exits 1 if a row that ran falls short of its target.

A row that did not run shows "not run" or, with --write, keeps its entry in docs/scorecard.md. Each
figure carries the date and commit at which it was measured; "+" after a commit means that the
working tree had changes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from tools.check.rows import simulation  # noqa: E402
from tools.check.rows.base import Figure, Gate, Row  # noqa: E402
from tools.check.rows.table import ROWS  # noqa: E402

DOCUMENT = ROOT / "docs" / "scorecard.md"
NOT_RUN = "not run"
HEAD = """# Scorecard

What Laminar promises about reliability, and what its tests have reached. Made by
`python tools/check/scorecard.py --gate release --write`; the "change" column is run for every
change (.ci/run; rows 6 and 7 by `make test-all`), the "release" column by hand. "not run" means
just that.

| # | promise | change: target | change: reached | release: target | release: reached |
|---|---|---|---|---|---|
"""


class Outcome(NamedTuple):
    """A row and its result in this run."""

    row: Row
    figure: Figure | None  #: None if not run
    seconds: float


def main() -> int:
    arguments = _arguments()
    if arguments.fresh:
        simulation.use_fresh(arguments.fresh)
    chosen = [row for row in ROWS if row.number in arguments.rows - arguments.but]
    outcomes = [_run(row, arguments.gate) for row in chosen]
    stamp = f"{datetime.now(UTC):%Y-%m-%d}, {_commit()}"
    print(_as_json(outcomes, arguments.gate, stamp) if arguments.json else _as_text(outcomes))
    if arguments.write:
        _write(outcomes, arguments.gate, stamp)
    return 1 if any(o.figure is not None and not o.figure.passed for o in outcomes) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = {row.number for row in ROWS}
    parser.add_argument("--rows", type=_numbers, default=every, metavar="1,3,20", help="only these")
    parser.add_argument("--but", type=_numbers, default=set(), metavar="7", help="not these")
    parser.add_argument("--gate", choices=("pr", "release"), default="pr")
    parser.add_argument(
        "--fresh", type=int, metavar="N", help="simulated seeds that only this commit is tried with"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--write", action="store_true", help="enter the figures in the document")
    return parser.parse_args()


def _numbers(text: str) -> set[int]:
    known = {row.number for row in ROWS}
    wanted = {int(part) for part in text.split(",") if part.strip().isdigit()}
    if not wanted or not wanted <= known or len(wanted) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: name rows 1 to {max(known)}, as in 1,3,20")
    return wanted


def _run(row: Row, gate: Gate) -> Outcome:
    if row.run is None:
        return Outcome(row, None, 0.0)
    print(f"row {row.number}: {row.promise} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        figure = row.run(gate)
    except Exception:  # a row that raises falls short; the other rows still run
        figure = Figure("the run broke", False, traceback.format_exc())
    seconds = time.monotonic() - began
    verdict = "reached" if figure.passed else "FELL SHORT"
    print(f"row {row.number}: {verdict}: {figure.reached} ({seconds:.0f} s)", file=sys.stderr)
    return Outcome(row, figure, seconds)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "no commit") + (
        "+" if git("status", "--porcelain") else ""
    )


# --- what is printed --------------------------------------------------------------------------


def _as_text(outcomes: Iterable[Outcome]) -> str:
    lines = []
    for row, figure, seconds in outcomes:
        verdict = "-" if figure is None else "ok" if figure.passed else "SHORT"
        reached = NOT_RUN if figure is None else f"{figure.reached} ({seconds:.0f} s)"
        lines.append(f"{row.number:>3}  {verdict:5}  {row.promise}: {reached}")
        if figure is not None and not figure.passed:
            lines += [f"            {line}" for line in figure.detail.splitlines()]
    return "\n".join(lines)


def _as_json(outcomes: Iterable[Outcome], gate: Gate, stamp: str) -> str:
    return "\n".join(
        json.dumps(
            {
                "row": row.number,
                "promise": row.promise,
                "gate": gate,
                "target": row.pr if gate == "pr" else row.release,
                "reached": NOT_RUN if figure is None else figure.reached,
                "passed": None if figure is None else figure.passed,
                "detail": "" if figure is None else figure.detail,
                "seconds": round(seconds, 1),
                "when": stamp,
            }
        )
        for row, figure, seconds in outcomes
    )


def _write(outcomes: Iterable[Outcome], gate: Gate, stamp: str) -> None:
    """Update the document with the rows that ran; keep all other entries."""
    reached = _read_document()
    for row, figure, _ in outcomes:
        if figure is not None:
            text = figure.reached if figure.passed else f"**short:** {figure.reached}"
            reached[row.number, gate] = f"{text} ({stamp})"
    lines = [
        f"| {row.number} | {row.promise} | {row.pr} | {reached.get((row.number, 'pr'), NOT_RUN)} "
        f"| {row.release} | {reached.get((row.number, 'release'), NOT_RUN)} |"
        for row in ROWS
    ]
    DOCUMENT.write_text(HEAD + "\n".join(lines) + "\n")


def _read_document() -> dict[tuple[int, str], str]:
    """Read the two result columns of the document, by row and gate."""
    found: dict[tuple[int, str], str] = {}
    for line in DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else []:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[0].isdigit():
            found[int(cells[0]), "pr"], found[int(cells[0]), "release"] = cells[3], cells[5]
    return found


if __name__ == "__main__":
    sys.exit(main())
