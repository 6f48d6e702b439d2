"""Changes of source text, and a copy of the repository in which they are made.

Reads   tables of patches (tools/check/rows/planted.txt, which says how one is written); the
        repository
Gives   `read`, `patched`; `copy`, a directory in which `python -m` finds the changed package first
Raises  PatchError with the name of the patch: its text is not there, or more than once

A copy and not a hook of imports: processes that the program starts run the changed text as well.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("laminar", "configs", "tools")  #: laminar/configs is a link
WHOLE = (
    *PACKAGE, "tests", "docs", "requirements", "pyproject.toml", "constraints.txt",
    "Makefile", "README.md",
)  # fmt: skip


class PatchError(Exception):
    """A patch does not fit the text any more."""


class Change(NamedTuple):
    """One place of one file."""

    path: str
    old: str  #: whole lines
    new: str


class Patch(NamedTuple):
    """What a patch is called, and all that it changes."""

    name: str
    words: tuple[str, ...]  #: behind the name
    changes: tuple[Change, ...]


def read(table: Path) -> dict[str, Patch]:
    """All patches of a table, by name; what stands before the first one is for people."""
    _, *blocks = ("\n" + table.read_text()).split("\n== ")
    patches = [_patch(block) for block in blocks]
    found = {patch.name: patch for patch in patches}
    if len(found) < len(patches):
        raise PatchError(f"{table.name}: a name stands there twice")
    return found


def _patch(block: str) -> Patch:
    head, *hunks = block.split("\n@ ")
    name, *words = head.splitlines()[0].split()
    return Patch(name, tuple(words), tuple(_change(name, hunk) for hunk in hunks))


def _change(name: str, hunk: str) -> Change:
    path, *lines = hunk.splitlines()
    lines = [line for line in lines if line and line[0] != "#"]
    if bad := [line for line in lines if line[0] not in " -+"]:
        raise PatchError(f"{name}: {bad[0]!r} begins with none of ' ', '-' and '+'")
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    if not old or old == new:
        raise PatchError(f"{name}: it changes nothing of {path}")
    return Change(path, old, new)


def patched(patch: Patch, root: Path = ROOT) -> dict[str, str]:
    """The new text of each file that it changes."""
    texts: dict[str, str] = {}
    for path, old, new in patch.changes:
        if path not in texts:
            file = root / path
            texts[path] = file.read_text() if file.exists() else ""
        text = f"\n{texts[path]}"
        if (times := text.count(f"\n{old}")) != 1:
            raise PatchError(f"{patch.name}: this stands in {path} {times} times, not once:\n{old}")
        texts[path] = text.replace(f"\n{old}", f"\n{new}")[1:]
    return texts


@contextmanager
def copy(
    texts: Mapping[str, str], parts: tuple[str, ...] = PACKAGE, root: Path = ROOT
) -> Iterator[Path]:
    """A directory with these files and folders of the repository, `texts` in place of their own."""
    with tempfile.TemporaryDirectory(prefix="patched-") as name:
        folder = Path(name)
        for part in parts:
            if (root / part).is_dir():
                shutil.copytree(root / part, folder / part, symlinks=True)  # with its bytecode
            elif (root / part).exists():
                shutil.copy2(root / part, folder / part)
        for path, text in texts.items():
            (folder / path).write_text(text)
        yield folder


def environment(folder: Path) -> dict[str, str]:
    """In which Python takes the package of the copy, and the tools of the repository if the copy
    has none."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
