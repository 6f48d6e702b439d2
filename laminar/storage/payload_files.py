"""Large payloads as files next to the database, named by their content.

Reads   and writes one folder: files named xxh3_128 (hex) of their bytes, never changed
Raises  DamageError for a missing or changed file; ports.DiskError if a write or sync fails,
        DiskFull if the disk is full

A blob of many pages slows down every later checkpoint of the database, so payloads above
INLINE_LIMIT are stored here. A file is written under a temporary name, synced, renamed, and its
folder synced before the row that names it commits: a crash cannot remove a file that a row names.
A file that no row names is harmless and removed at the next start.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import xxhash

from laminar.names.ports import DiskError, DiskFull, no_room
from laminar.run.renames import sync, write_whole
from laminar.storage.rows import DamageError

INLINE_LIMIT = 64 * 2**10  #: largest payload in bytes that is stored in the database


def folder_of(database: Path) -> Path:
    """Return the folder for a database's payload files: store.files/ for store.sqlite."""
    return database.with_name(f"{database.stem}.files")


def write(folder: Path, data: bytes) -> str:
    """Make `data` durable and return its name; the same bytes again only sync the folder."""
    name = xxhash.xxh3_128_hexdigest(data)
    try:
        if not (folder / name).exists():
            write_whole(folder / name, data, durable=True)
        else:
            sync(folder)
    except OSError as error:
        raise _make_disk_error(folder / name, error) from error
    return name


def read(folder: Path, name: str) -> bytes:
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise DamageError(f"payload file {folder / name} is missing") from None
    except OSError as error:
        raise _make_disk_error(folder / name, error) from error
    if xxhash.xxh3_128_hexdigest(data) != name:
        raise DamageError(f"payload file {folder / name} does not match the digest in its name")
    return data


def _make_disk_error(path: Path, error: OSError) -> DiskError:
    kind = DiskFull if no_room(error) else DiskError
    return kind(error.errno, f"payload file {path}: {error.strerror}")


def create_folder(folder: Path) -> None:
    """Create the folder and make its entry in the parent durable."""
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def remove_unnamed_files(folder: Path, named: Collection[str]) -> None:
    """Remove files that no row names, left by restarted attempts and interrupted writes."""
    for path in folder.iterdir():
        if path.name not in named:
            path.unlink()


def remove_files(folder: Path, names: Collection[str]) -> None:
    """Remove these files, ignoring missing ones."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
