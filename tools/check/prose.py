"""Count violations of docs/style.md: one-word names, bad docstring openings, banned phrases.

Reads   laminar/, tools/, docs/, README.md
Gives   count_one_word_names, count_bad_beginnings (each: offenders, total), find_phrases
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUSTOMARY = re.compile(
    "add|append|backward|cancel|clear|close|commit|copy|decode|decref|delete|discard|encode|enter"
    "|exit|extend|fetch|finish|flush|forward|get|insert|items|join|keys|load|lock|main|open|pop"
    "|push|put|read|receive|recv|register|release|remove|reset|run|save|seek|send|set|start|step"
    "|stop|sync|update|values|wait|write"
)
"""One-word names that Python and its libraries use for methods and entry points."""
BAD_BEGINNING = re.compile(
    r"(what|who|whose|whom|which|of|one|it|its|those|there)\b(?!-)", re.IGNORECASE
)
PHRASES = re.compile(
    r"\b(go(?:es|ing)? on|went on|(?<!there )is no(?! longer| more)|want of|besides?|nobody"
    r"|somebody|whoever|anew|likewise|that there is|is waited for|is heard from|may stay away"
    r"|the like)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)

TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("laminar", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def count_one_word_names() -> tuple[int, int]:
    """Count the functions and methods with an uncustomary one-word name, and all of them."""
    names = [node.name for _, tree in python_files() for node in _functions(tree)]
    words = [name.strip("_") for name in names]
    return sum("_" not in w and not CUSTOMARY.fullmatch(w) for w in words), len(names)


def _functions(tree: ast.Module) -> Iterator[Function]:
    """Yield module functions and methods, except properties and special methods."""
    bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, Function) and not node.name.startswith("__"):
            decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
            if "property" not in decorators and not decorators.endswith("setter"):
                yield node


def count_bad_beginnings() -> tuple[int, int]:
    """Count the docstrings that do not lead with their subject, and all docstrings."""
    texts = [text for _, tree in python_files() for text in _docstrings(tree)]
    return sum(bool(BAD_BEGINNING.match(text)) for text in texts), len(texts)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (
            t := ast.get_docstring(node)
        ):
            yield t


def find_phrases() -> list[str]:
    """Return banned phrases as "file:line: phrase", outside identifiers and quoted code."""
    found = []
    for path, _ in python_files():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in TEXT:
                found += _find(path, token.start[0], token.string)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found += _find(path, 1, path.read_text())
    return found


def _find(path: Path, first_line: int, text: str) -> Iterator[str]:
    shown = CODE.sub(lambda quoted: re.sub(r"[^\n]", "`", quoted[0]), text)
    for match in PHRASES.finditer(shown):
        line = first_line + shown.count("\n", 0, match.start())
        yield f"{path.relative_to(ROOT)}:{line}: {match[0]}"
