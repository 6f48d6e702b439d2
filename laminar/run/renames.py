"""Files and directories that get their name when they are whole: the one place that renames.

Writes  .NAME.PID, then NAME
Raises  OSError from the disk

Readers see what had the name before, or the new content, never half of it. Only a durable renaming
says more: after a power cut there is one of the two. For that the content is on the disk before it
has its name, and the directory's entries are before anybody hears of it. What is made anew by the
next process, or can be made again by a command, need not be durable, and costs no sync.

Nothing else in this package renames by hand (tests/test_renames.py, and ruff's TID251).
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """Give the file this content; where that fails, nothing of it is left."""
    new = get_temp_path(path)
    try:
        new.write_bytes(data)
        if durable:
            sync(new)
        rename(new, path, durable=durable)
    except OSError:
        new.unlink(missing_ok=True)  # a full disk needs the room
        raise


def get_temp_path(path: Path) -> Path:
    """Where this process makes what is to be `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def rename(old: Path, new: Path, *, durable: bool) -> None:
    """Rename a file, in the place of one that had the name. The content of `old` is synced already,
    where it is to be durable; afterwards so is its name."""
    os.replace(old, new)  # noqa: TID251
    if durable:
        for parent in dict.fromkeys((new.parent, old.parent)):
            sync(parent)


def sync(path: Path) -> None:
    """What this file or directory holds is on the disk on return."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
