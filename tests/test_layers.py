"""Who may import whom: data below decisions below I/O, and pure modules stay pure."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "laminar"

#: What each pure package may import of ours, and, besides `typing` and the like, of others.
OURS = {
    "ids.py": (),
    "ports.py": (),
    "roles.py": (),
    "events": ("ids", "roles", "events"),
    "core": ("ids", "roles", "events", "core"),
    "eventlog": ("ids", "ports", "events", "core", "eventlog"),
    "net/frames.py": ("events", "net.frames"),
    "net/session.py": ("events", "net.frames", "net.session_boxes"),
    "net/session_boxes.py": ("events", "net.frames"),
    "coordinator/detector.py": ("roles", "core", "events"),
    "coordinator/unhandled.py": ("events", "eventlog"),
    "coordinator/restarts.py": ("exit_codes",),
    "coordinator/tick.py": (
        "ids", "events", "core", "eventlog", "net.frames", "net.session", "net.session_boxes",
        "net.wakeups", "coordinator.detector", "coordinator.hashes", "coordinator.unhandled",
        "ports",
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


def module_name(path: Path) -> str:
    """Its full name; that of the package for an `__init__`."""
    parts = ("laminar", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """By module of ours: what it imports of ours, anywhere, also only for the types."""
    texts = {module_name(path): path.read_text() for path in ROOT.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, text in texts.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {n if n in texts else node.module for n in names}
        graph[name] = found & texts.keys()
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What a module imports, also through others."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        ahead += (new := graph[ahead.pop()] - seen)
        seen |= new
    return seen


def test_imports_have_no_circles() -> None:
    """Whoever reads a module can read first what it builds on; imports for types count, too."""
    graph = import_graph()
    assert len(graph) > 150
    assert not {name for name in graph if name in reachable(graph, name)}


def test_the_logic_of_every_actor_is_held_to_its_contract() -> None:
    """What is not in laminar/actors/system is logic, and the simulator runs it."""
    linter = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    listed = [set(contract.get("source_modules", ())) for contract in linter["contracts"]]
    held = next(modules for modules in listed if "laminar.actors.node" in modules)
    files_of_logic = {path for path in (ROOT / "actors").glob("*.py") if path.stem != "__init__"}
    assert held == {module_name(path) for path in files_of_logic}


def test_nobody_uses_pickle() -> None:
    """Neither to read nor to write: it runs what it reads."""
    for path in ROOT.rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert not tops & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path


def test_tools_import_nothing_from_tests() -> None:
    """What both need is in laminar/testing."""
    for path in (ROOT.parent / "tools").rglob("*.py"):
        assert not {name for name in imports(path) if name.partition(".")[0] == "tests"}, path


def test_standard_names_are_of_the_standard_library() -> None:
    assert STANDARD - {"__future__"} <= sys.stdlib_module_names
