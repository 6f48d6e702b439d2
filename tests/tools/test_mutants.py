"""Mutants of a change: what is made of a line, what is left alone, who is asked to notice."""

from __future__ import annotations

import pytest

from tools.check.imports import Imports
from tools.check.mutate import mutations


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("if a < b: c()", {"if a <= b: c()", "if not (a < b): c()", "if a < b: pass"}),
        ("x = a and not b", {"x = a or not b", "x = a and bool(b)"}),
        ("x = 3 + y", {"x = 4 + y", "x = (2) + y", "x = 3 - y"}),
        ("x += y", {"x -= y", "pass"}),
        ("x = f(a, b)", {"x = f(b, a)"}),
        ("x = a if b else c", {"x = c if b else a"}),
        ("x = a is not None", {"x = a is None"}),
        ("x: int = True", {"x: int = False"}),
        ("log.warning('x', 3 + 4)", set()),
        ("'words, 3 < 4'", set()),
        ("raise E(a, 1)", {"pass"}),
    ],
)
def test_a_line_becomes_other_lines(line: str, made: set[str]) -> None:
    assert {mutation.applied(line) for mutation in mutations(line, {1})} == made


def test_a_function_returns_at_once() -> None:
    source = 'def f(a) -> bool:\n    """ä: words"""\n    return a\n'
    made = {mutation.applied(source) for mutation in mutations(source, {1})}
    assert made == {
        source.replace("    return a", f"    return {value}\n    return a")
        for value in (True, False)
    }


def test_only_lines_of_the_change_are_mutated() -> None:
    source = "x = 1\ny = 2\n"
    assert {mutation.line for mutation in mutations(source, {2})} == {2}


def test_tests_that_use_a_file_are_found_through_what_they_import() -> None:
    users = Imports().distances("laminar/core/scheduling/admission.py")
    assert (
        users["tests/core/scheduling/test_admission.py"] <= 2
        and users["tools/simulator/run.py"] > 1
    )
