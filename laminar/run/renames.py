"""Atomic writes: files and directories that get their name when complete. All renames are here.

Writes  .NAME.PID, then NAME
Raises  OSError from the disk

Readers see the old content or the new, never a part. Only a durable rename also survives a power
cut: the content is synced before the rename, and the directory before the call returns. A file
that the next process rewrites, or that a command can regenerate, is written without sync.

No other module of this package renames (tests/test_renames.py, and ruff's TID251).
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """Write a file atomically; a failure leaves nothing behind."""
    new = get_temp_path(path)
    try:
        new.write_bytes(data)
        if durable:
            sync(new)
        rename(new, path, durable=durable)
    except OSError:
        new.unlink(missing_ok=True)  # a full disk needs the space
        raise


def get_temp_path(path: Path) -> Path:
    """Return the temporary name under which this process writes `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def rename(old: Path, new: Path, *, durable: bool) -> None:
    """Rename a file and replace any previous `new`; if `durable`, `old` must be synced already."""
    os.replace(old, new)  # noqa: TID251
    if durable:
        for parent in dict.fromkeys((new.parent, old.parent)):
            sync(parent)


def sync(path: Path) -> None:
    """Sync a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
