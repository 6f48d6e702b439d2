"""Files that are written completely or not at all: snapshots and compressed segments.

Writes  NAME.tmp, renamed to NAME once its content is durable
Raises  DiskError: end the process, nothing is retried

A crash leaves the old NAME or the new one, and perhaps a NAME.tmp that is never read; the next
coordinator removes it.
"""

from __future__ import annotations

from laminar.names.ports import Disk, DiskError

UNFINISHED = ".tmp"


def write_whole(disk: Disk, name: str, data: bytes) -> None:
    """Write a file, durable on return, under its name."""
    try:
        file = disk.create_file(name + UNFINISHED)
    except FileExistsError as error:
        raise DiskError(
            f"{name}{UNFINISHED} already exists: another coordinator of this run is writing it"
        ) from error
    file.append(data)
    file.sync()
    file.close()
    disk.replace_file(name + UNFINISHED, name)


def remove_unfinished(disk: Disk) -> None:
    """Remove leftovers of a crash; only for the writer that has just taken the log over."""
    for name in disk.list_names():
        if name.endswith(UNFINISHED):
            disk.remove(name)
