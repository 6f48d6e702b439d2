"""laminar audit RUN: check that the coordinator's, the store's and the trainer's books agree."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from laminar.analysis.audit.audit import Audit, audit_run
from laminar.analysis.audit.ledger_book import LedgerRow
from laminar.launch.emulated_note import list_notes


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("audit")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.set_defaults(function=run_audit)


def run_audit(arguments: argparse.Namespace) -> int:
    """Print the ledger and the contradictions; return 0 if the books agree, else 1."""
    found = audit_run(arguments.run)
    for line in [*list_notes(arguments.run), *format_audit(found)]:
        print(line)
    return 1 if found.problems else 0


def format_audit(found: Audit) -> list[str]:
    """Format the ledger as a table, then failed rewards, notes, problems and the verdict."""
    text = [f"{'':<28} {'groups':>9} {'trajectories':>13} {'tokens':>13}"]
    text += [_table_line(row) for row in found.ledger]
    text += [f"reward {reason}: {count}" for reason, count in sorted(found.bad_rewards.items())]
    text += [f"note: {note}" for note in found.notes]
    text += [f"problem: {problem}" for problem in found.problems]
    verdict = "books agree"
    if found.problems:
        verdict = f"the books do NOT agree: {len(found.problems)} problems"
    return [*text, verdict]


def _table_line(row: LedgerRow) -> str:
    return f"{row.name:<28} {row.groups:>9} {row.trajectories:>13} {row.tokens:>13}"
