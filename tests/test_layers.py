"""Who may import whom: data below decisions below I/O, and pure modules stay pure."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "laminar"

#: What each pure package may import of ours, and, besides `typing` and the like, of others.
OURS = {
    "ids.py": (),
    "ports.py": (),
    "events": ("ids", "events"),
    "core": ("ids", "events", "core"),
    "eventlog": ("ids", "ports", "events", "core", "eventlog"),
    "net/frames.py": ("events", "net.frames"),
    "net/session.py": ("events", "net.frames", "net.session"),
    "coordinator/detector.py": ("core", "events"),
    "coordinator/unhandled.py": ("events", "eventlog"),
    "coordinator/restarts.py": ("exit_codes",),
    "coordinator/tick.py": (
        "ids", "events", "core", "eventlog", "net.frames", "net.session", "coordinator.detector",
        "coordinator.hashes", "coordinator.unhandled", "net.wakeups", "ports",
    ),
    "coordinator/hashes.py": ("core", "eventlog", "ports"),
    "actors/protocol.py": (),
}  # fmt: skip
THEIRS = {"msgspec", "msgpack", "xxhash", "zstandard"}
STANDARD = {
    "__future__", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools",
    "heapq", "itertools", "math", "operator", "re", "struct", "typing", "zlib",
}  # fmt: skip


def files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "laminar" else {node.module}
            if node.module.count(".") == 1:  # from laminar.core import dispatch
                found |= {n for n in names if (ROOT.parent / n.replace(".", "/")).exists()}
    return found


@pytest.mark.parametrize("place", OURS)
def test_pure_modules_import_only_what_is_below_them(place: str) -> None:
    """No clock, no chance, no file, no socket, no event loop, no tensor."""
    for path in files(place):
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "laminar":
                allowed = any(rest == o or rest.startswith(f"{o}.") for o in OURS[place])
            else:
                allowed = top in STANDARD or top in THEIRS
            assert allowed, f"{path.relative_to(ROOT.parent)} imports {name}"


def test_nobody_uses_pickle() -> None:
    """Neither to read nor to write: it runs what it reads."""
    for path in ROOT.rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert not tops & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path


def test_standard_names_are_of_the_standard_library() -> None:
    assert STANDARD - {"__future__"} <= sys.stdlib_module_names
