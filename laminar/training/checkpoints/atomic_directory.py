"""A directory of the run that is made beside its name, and has it when it is whole.

Writes  .NAME.partial, then NAME
Gives   ThreadedDirectories, the part of ModelFiles (actors/model_files.py) that knows no model
Raises  OSError from the disk
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from laminar.run.renames import rename, sync


class ThreadedDirectories:
    """What takes time runs in a thread."""

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
    """An empty directory for what is to become `directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial")
    for left in (partial, _set_aside(directory)):  # by a process that died half-way
        if left.exists():
            shutil.rmtree(left)
    partial.mkdir()
    return partial


def _sync_all(directory: Path) -> None:
    """All its files are on the disk on return."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def _rename_directory(directory: Path, name: Path) -> None:
    """What was synced has this name, also after a power cut; what had it before is removed.

    Only a trainer that was started again finds something there: the step, or the export, of one
    that died before anybody had heard of it.
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
    """Directories whose name begins with a dot are parts of one."""
    files = sorted(parent.glob(f"[!.]*/{name}"))
    return {file.parent: file.read_bytes() for file in files}
