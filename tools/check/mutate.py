"""Small mutations of Python source that change what the program does.

Reads   a source text, the lines that may be changed
Gives   `mutations`: the position, replacement and name of each mutation

Text for people is left unchanged: docstrings, messages, annotations, lines of a process's log.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import NamedTuple

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//"}
#: Calls that are not mutated, including their arguments.
SPEECH = {"log", "announce", "print", "warning", "error", "fail", "hit"}


class Mutation(NamedTuple):
    """A mutation that replaces source[start:end] with `text`."""

    line: int
    what: str
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def mutations(source: str, lines: Collection[int]) -> list[Mutation]:
    """Return all mutations that begin in these lines and still compile."""
    walker = _Walker(source)
    found = {m for m in walker.walk(ast.parse(source), None) if m.line in lines}
    return sorted(m for m in found if _compiles(m.applied(source)))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Walker:
    """A walk over the syntax tree of a source, with offsets into its text."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines()

    def walk(self, node: ast.AST, parent: ast.AST | None) -> Iterator[Mutation]:
        if isinstance(node, ast.stmt) and not _is_speech(node):
            yield from self._of_statement(node)
        if isinstance(node, ast.expr):
            yield from self._of_expression(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "msg"):
                continue
            if isinstance(node, ast.Raise) and name == "exc":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_speech(child):
                    yield from self.walk(child, node)

    def _of_statement(self, node: ast.stmt) -> Iterator[Mutation]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._early(node)
        elif isinstance(node, ast.If | ast.While):
            yield self._change(node.test, "negated", f"not ({self._text(node.test)})")
        elif isinstance(node, ast.AugAssign):
            yield from self._operator(node.target, node.value, {"+=": "-=", "-=": "+="})
        if _is_droppable(node):
            yield self._change(node, "dropped", "pass")

    def _early(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        """Yield early returns: of nothing, of a constant truth value, or of an empty string."""
        returns = ast.unparse(node.returns) if node.returns else ""
        values = {"None": ("",), "bool": (" True", " False"), "str": (' ""',)}.get(returns, ())
        body = node.body[1:] if ast.get_docstring(node) else node.body
        for value in values if body else ():
            first = body[0]
            at = self._offset(first.lineno, first.col_offset)
            indent = " " * first.col_offset
            yield Mutation(
                node.lineno, f"returns{value} at once", at, at, f"return{value}\n{indent}"
            )

    def _of_expression(self, node: ast.expr) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from self._operator(left, right, COMPARISONS)
        elif isinstance(node, ast.BinOp):
            yield from self._operator(node.left, node.right, ARITHMETIC)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator(left, right, {"and": "or", "or": "and"})
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._change(node, "negation removed", f"bool({self._text(node.operand)})")
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.IfExp):
            yield from self._swap(node.body, node.orelse, "branches swapped")
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            for one, other in zip(node.args, node.args[1:], strict=False):
                yield from self._swap(one, other, "arguments swapped")

    def _constant(self, node: ast.Constant) -> Iterator[Mutation]:
        if isinstance(node.value, bool):
            yield self._change(node, "inverted", str(not node.value))
        elif isinstance(node.value, int):
            yield self._change(node, "incremented", str(node.value + 1))
            yield self._change(node, "decremented", f"({node.value - 1})")
        elif isinstance(node.value, float):
            yield self._change(node, "doubled", str(node.value * 2 + 1))

    def _operator(
        self, left: ast.expr, right: ast.expr, others: dict[str, str]
    ) -> Iterator[Mutation]:
        """Mutate the operator between two expressions; skip it if a comment stands there too."""
        start, end = self._end(left), self._offset(right.lineno, right.col_offset)
        between = self._source[start:end]
        found = between.strip(" ()\n\t")
        if found in others and "#" not in between:
            at = start + between.index(found)
            text = others[found]
            yield Mutation(self._line_of(at), f"{found} became {text}", at, at + len(found), text)

    def _swap(self, one: ast.expr, other: ast.expr, what: str) -> Iterator[Mutation]:
        if isinstance(one, ast.Starred) or isinstance(other, ast.Starred):
            return
        first, second = self._text(one), self._text(other)
        if first != second:
            start, end = self._offset(one.lineno, one.col_offset), self._end(other)
            middle = self._source[self._end(one) : self._offset(other.lineno, other.col_offset)]
            yield Mutation(one.lineno, what, start, end, second + middle + first)

    def _change(self, node: ast.expr | ast.stmt, what: str, text: str) -> Mutation:
        start = self._offset(node.lineno, node.col_offset)
        return Mutation(node.lineno, what, start, self._end(node), text)

    def _text(self, node: ast.expr) -> str:
        return self._source[self._offset(node.lineno, node.col_offset) : self._end(node)]

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _offset(self, line: int, column: int) -> int:
        """Convert a position of the tree, which counts UTF-8 bytes, to an offset in the text."""
        before = self._lines[line - 1].encode()[:column].decode() if self._lines else ""
        return self._starts[line - 1] + len(before)

    def _line_of(self, offset: int) -> int:
        return self._source.count("\n", 0, offset) + 1


def _is_speech(node: ast.AST) -> bool:
    """Return whether a node is text for people: a docstring, an f-string, or a logging call."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    names = {n.attr for n in ast.walk(node.value.func) if isinstance(n, ast.Attribute)}
    names |= {n.id for n in ast.walk(node.value.func) if isinstance(n, ast.Name)}
    return bool(names & SPEECH)


def _is_droppable(node: ast.stmt) -> bool:
    """Return whether the statement can be removed without leaving a name undefined."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)
