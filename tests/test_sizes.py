"""Sizes in laminar/ and the simulator: a function has at most 40 lines, a class 250, a file 600.

A function's docstring does not count: it is there for the caller. What is longer has its place in
LONGER, with its size in tens; that list gets shorter and not longer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "laminar"
SIMULATOR = PACKAGE.parent / "tools" / "simulator"
FUNCTION_LINES, CLASS_LINES, FILE_LINES = 40, 250, 600
LONGER = {
    "actors/trainer.py Trainer": 260,
    "actors/rollout.py Rollout": 310,
    "coordinator/tick.py Tick": 360,
    "tools/simulator/checks/safety.py Checks": 360,
    "tools/simulator/faults/faults.py Faults": 310,
    "tools/simulator/runtime/boot.py Boot": 270,
    "tools/simulator/runtime/coordinator.py SimCoordinator": 330,
    "storage/handlers.py Handlers": 260,
    "storage/tables.py Tables": 300,
    "weights/chain/receiver.py Receiver": 340,
    "weights/chain/sender.py Sender": 300,
}


def lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of a class all, of a function all but its docstring."""
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    if isinstance(node, ast.ClassDef) or ast.get_docstring(node, clean=False) is None:
        return total
    docstring = node.body[0]
    assert docstring.end_lineno is not None
    return total - (docstring.end_lineno - docstring.lineno + 1)


def too_long(name: str, text: str) -> Iterator[tuple[str, int]]:
    """(what, its lines)"""
    if text.count("\n") > FILE_LINES:
        yield name, text.count("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            most = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            if lines(node) > most:
                yield f"{name} {node.name}", lines(node)


def test_nothing_is_longer_but_what_is_listed() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    files |= {str(path.relative_to(SIMULATOR.parents[1])): path for path in SIMULATOR.rglob("*.py")}
    found = dict(
        entry for name, path in files.items() for entry in too_long(name, path.read_text())
    )
    assert {what: size for what, size in found.items() if size > LONGER.get(what, 0)} == {}
    assert LONGER.keys() <= found.keys(), "what is short enough by now leaves the list"


def test_docstring_of_a_function_does_not_count() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES - 1)
    assert not dict(too_long("a.py", f'def f():\n    """A.\n\n    B."""\n{body}'))
    assert dict(too_long("a.py", f"def f():\n{body}    y = 1\n")) == {"a.py f": FUNCTION_LINES + 1}
