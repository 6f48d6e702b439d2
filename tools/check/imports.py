"""Import graph of the package, the tools and the tests.

Reads   laminar/, tools/, tests/
Gives   Imports: `distances`, the number of imports between a module and each file that uses it;
        `pairs` and `cycles`
"""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]


class Imports:
    """Reverse import graph: for each file, the files that import it."""

    def __init__(
        self, root: Path = ROOT, folders: tuple[str, ...] = ("laminar", "tools", "tests")
    ) -> None:
        self._known = {}
        for folder in folders:
            for file in sorted((root / folder).rglob("*.py")):
                path = str(file.relative_to(root))
                self._known[path.removesuffix(".py").removesuffix("/__init__")] = path
        self._users = defaultdict[str, set[str]](set)  #: importing files by imported path
        for path in self._known.values():
            for used in self._used(path, (root / path).read_text()):
                self._users[used].add(path)

    def _used(self, path: str, source: str) -> set[str]:
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        places = {name.replace(".", "/") for name in names}
        return {self._known[place] for place in places & self._known.keys()} - {path}

    def distances(self, path: str) -> dict[str, int]:
        """Return the import distance of every file that uses this one, directly or indirectly."""
        found, waiting = {path: 0}, deque([path])
        while waiting:
            used = waiting.popleft()
            for user in sorted(self._users[used]):
                if user not in found:
                    found[user] = found[used] + 1
                    waiting.append(user)
        return found

    def pairs(self) -> list[tuple[str, str]]:
        """Return every import between two files as (importing file, imported file)."""
        return sorted((user, used) for used, users in self._users.items() for user in users)

    def cycles(self) -> list[set[str]]:
        """Return the sets of files that import each other, directly or through files of the set."""
        graph = networkx.DiGraph(self.pairs())
        return [found for found in networkx.strongly_connected_components(graph) if len(found) > 1]
