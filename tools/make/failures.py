"""Update the table of docs/failures.md from names/roles.py; other words of its cells are kept.

Usage: python -m tools.make.failures
Reads   laminar/names/roles.py; settings and constants that the table names, for their values
Writes  docs/failures.md: rows, detection, restarts, losses and values; a test compares it
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from laminar.config import Config
from laminar.names.roles import ACTOR_ROLES, ROLE_TABLE, Restart, Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
TABLE = re.compile(r"(\| role .*\n\|---.*\n)((?:\|.*\n)+)")
LEASE = re.compile(r".*?`coordinator\.\w*lease_ms`|^$")
NAME = re.compile(r"(`([\w.]+\.\w+)`)(?: \([\d.]+\))?")
NEW = ("", "", "nothing", "`recovery.max_restarts` within `recovery.restart_window_s`", "")


def page() -> str:
    """Return the whole page."""
    return TABLE.sub(lambda found: found[1] + _update_rows(found[2]), PAGE.read_text())


def _update_rows(rows: str) -> str:
    split = [row.strip("| ").split(" | ") for row in rows.splitlines()]
    known = {name: row for name, *row in split}
    cells = {role: known.pop(role, list(NEW)) for role in Role}
    for role in Role:
        record = ROLE_TABLE[role]
        cells[role][1], cells[role][4] = record.restart, record.loss
        if role in ACTOR_ROLES:
            by = "`laminar train`" if record.restart == Restart.BY_STARTER else "its node"
            lease = "node_lease_ms" if record.long_lease else "lease_ms"
            text = f"{by}: its exit; the coordinator: silence for `coordinator.{lease}`"
            cells[role][0] = LEASE.sub(text, cells[role][0], count=1)
    lines = [f"| {' | '.join((name, *row))} |\n" for name, row in (cells | known).items()]
    return NAME.sub(lambda name: f"{name[1]} ({read_value(name[2]):.10g})", "".join(lines))


def read_value(name: str) -> Any:
    """Return the default of a setting, or a constant by its module."""
    section, _, key = name.rpartition(".")
    if section in Config.__struct_fields__:
        return getattr(getattr(Config(), section), key)
    return getattr(importlib.import_module(f"laminar.{section}"), key)


if __name__ == "__main__":
    PAGE.write_text(page())
