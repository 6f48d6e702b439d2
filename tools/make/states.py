"""Draw docs/states.md: all statuses and transitions, from core/state/transitions.py.

Usage: python tools/make/states.py
Reads   laminar/core/state/transitions.py
Writes  docs/states.md: a diagram (Mermaid) and a list for each table; a test compares it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.core.state.transitions import TABLES, TransitionTable  # noqa: E402

PAGE = ROOT / "docs" / "states.md"
HEAD = """# States

What the coordinator keeps track of, with every status and every legal move. The tables are in
`laminar/core/state/transitions.py`; this page is made of them by `python tools/make/states.py`.
"""


def page() -> str:
    """Return the whole text."""
    return "\n".join([HEAD, *(line for table in TABLES for line in _section(table))])


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


def _name(status: str) -> str:
    """Return a status without hyphens, which Mermaid rejects."""
    return status.replace("-", "_")


if __name__ == "__main__":
    PAGE.write_text(page())
