"""Directories of the run that appear under their name only when complete.

Writes  .NAME.partial, then NAME
Gives   ThreadedDirectories, the model-independent part of ModelFiles (actors/model_files.py)
Raises  OSError from the disk
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from laminar.run.renames import rename, sync


class ThreadedDirectories:
    """Directory operations for an event loop: slow ones run in a thread."""

    async def create_partial(self, directory: Path) -> Path:
        return await asyncio.to_thread(_create_partial, directory)

    async def sync(self, directory: Path) -> None:
        await asyncio.to_thread(_sync_all, directory)

    async def rename(self, directory: Path, name: Path) -> None:
        await asyncio.to_thread(_rename_directory, directory, name)

    async def find_directories(self, parent: Path, name: str) -> dict[Path, bytes]:
        return await asyncio.to_thread(_find_directories, parent, name)

    async def remove(self, directory: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, directory)


def _create_partial(directory: Path) -> Path:
    """Create an empty directory for the content of the later `directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial")
    for left in (partial, _set_aside(directory)):  # left by a process that died half-way
        if left.exists():
            shutil.rmtree(left)
    partial.mkdir()
    return partial


def _sync_all(directory: Path) -> None:
    """Sync all files of a directory to the disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def _rename_directory(directory: Path, name: Path) -> None:
    """Give a synced directory its final name, durably; replace a directory of that name.

    Only a restarted trainer finds one: the step, or the export, of a trainer that died before
    reporting it.
    """
    before = _set_aside(name)
    name.parent.mkdir(exist_ok=True)
    if name.exists():
        rename(name, before, durable=False)
    rename(directory, name, durable=True)
    if before.exists():
        shutil.rmtree(before)


def _set_aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.before")


def _find_directories(parent: Path, name: str) -> dict[Path, bytes]:
    """Find directories with a file `name`; names that begin with a dot are incomplete ones."""
    files = sorted(parent.glob(f"[!.]*/{name}"))
    return {file.parent: file.read_bytes() for file in files}
