"""Patches of source text, and copies of the repository in which they are applied.

Reads   tables of patches (tools/check/rows/planted.txt documents the format); the repository
Gives   `read`, `patched`; `copy`, a directory in which `python -m` finds the changed package first
Raises  PatchError with the name of a patch whose text is missing or occurs more than once

A copy is used rather than an import hook, so that child processes run the changed text as well.
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
    """Failure to apply a patch to the current text."""


class Change(NamedTuple):
    """A replacement at one place in one file."""

    path: str
    old: str  #: whole lines; none in a new file
    new: str


class Patch(NamedTuple):
    """A named patch with all its changes."""

    name: str
    words: tuple[str, ...]  #: words after the name: faults, settings or tests
    changes: tuple[Change, ...]


def read(table: Path) -> dict[str, Patch]:
    """Read the patches of a table by name; skip the explanation before the first one."""
    _, *blocks = ("\n" + table.read_text()).split("\n== ")
    patches = [_patch(block) for block in blocks]
    found = {patch.name: patch for patch in patches}
    if len(found) < len(patches):
        raise PatchError(f"{table.name}: a name occurs twice")
    return found


def _patch(block: str) -> Patch:
    head, *hunks = block.split("\n@ ")
    name, *words = head.splitlines()[0].split()
    return Patch(name, tuple(words), tuple(_change(name, hunk) for hunk in hunks))


def _change(name: str, hunk: str) -> Change:
    path, *lines = hunk.splitlines()
    lines = [line for line in lines if line and line[0] != "#"]
    if bad := [line for line in lines if line[0] not in " -+"]:
        raise PatchError(f"{name}: {bad[0]!r} must begin with ' ', '-' or '+'")
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    if old == new:
        raise PatchError(f"{name}: the patch does not change {path}")
    return Change(path, old, new)


def patched(patch: Patch, root: Path = ROOT) -> dict[str, str]:
    """Return the new text of each file that the patch changes."""
    texts: dict[str, str] = {}
    for path, old, new in patch.changes:
        if path not in texts:
            file = root / path
            texts[path] = file.read_text() if file.exists() else ""
        text = f"\n{texts[path]}"
        if (times := text.count(f"\n{old}")) != 1:
            raise PatchError(f"{patch.name}: this occurs in {path} {times} times, not once:\n{old}")
        texts[path] = text.replace(f"\n{old}", f"\n{new}")[1:]
    return texts


@contextmanager
def copy(
    texts: Mapping[str, str], parts: tuple[str, ...] = PACKAGE, root: Path = ROOT
) -> Iterator[Path]:
    """Copy these files and folders of the repository to a directory, with `texts` applied."""
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
    """Return an environment whose Python path has the copy before the repository."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
