"""Draw docs/states.md: all statuses, transitions and kinds of failures.

Usage: python -m tools.make.states
Reads   laminar/core/state/transitions.py, failures.py
Writes  docs/states.md: a diagram (Mermaid) and a list for each table of transitions, and a table of
        failures; a test compares it
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from laminar.core.state.failures import FailureKind
from laminar.core.state.transitions import TABLES, TransitionTable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"
HEAD = """# States

Made by `python -m tools.make.states` of `laminar/core/state/transitions.py` and `failures.py`.
"""
FAILURES = """## Failure

| kinds | exit code | resumable | what to do |
|---|---|---|---|"""


def page() -> str:
    """Return the whole text."""
    tables = (line for table in TABLES for line in _section(table))
    return "\n".join([HEAD, *tables, FAILURES, *_failure_rows(), ""])


def _section(table: TransitionTable) -> Iterator[str]:
    yield f"## {table.of.capitalize()}\n"
    yield "```mermaid\nstateDiagram-v2\n    direction LR"
    yield f"    [*] --> {_name(next(iter(table.meaning)))}"
    labels: dict[tuple[str, str], list[str]] = {}
    for (status, trigger), target in table.moves.items():
        labels.setdefault((status, target), []).append(trigger)
    for (status, target), triggers in labels.items():
        yield f"    {_name(status)} --> {_name(target)}: {' / '.join(triggers)}"
    yield "```\n\n| status | meaning |\n|---|---|"
    yield from (f"| {status} | {meaning} |" for status, meaning in table.meaning.items())
    yield ""


def _failure_rows() -> Iterator[str]:
    """Yield a row per exit code and remedy, with the kinds that have them."""
    for (code, resumable, remedy), kinds in groupby(FailureKind, _result):
        shown = "<br>".join(f"`{kind}`: {kind.record.meaning}" for kind in kinds)
        yield f"| {shown} | {code} | {'yes' if resumable else 'no'} | {remedy} |"


def _result(kind: FailureKind) -> tuple[int, bool, str]:
    return kind.record.exit_code, kind.record.resumable, kind.record.remedy


def _name(status: str) -> str:
    """Return a status without hyphens, which Mermaid rejects."""
    return status.replace("-", "_")


if __name__ == "__main__":
    PAGE.write_text(page())
