"""Permissions in a run directory: a user who can write to a run can execute code as its owner.

Reads   owners and modes below RUN
Writes  the umask of this process; the mode of a private file
Gives   restrict_umask, open_private
Raises  check_private: ConfigError with the path, its mode and the fix
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from laminar.config import ConfigError
from laminar.run.directory import COMPARISON_FILE, REPORT_FILE

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNUSED = (REPORT_FILE, COMPARISON_FILE)
"""Pages that no process of a run reads; a command outside the run may have written them."""


def restrict_umask() -> None:
    """Let no other user write the files that this process creates from now on."""
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)


def open_private(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing, create it if missing; only its owner may use it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    if os.fstat(fd).st_mode & 0o077:  # of an earlier release
        with suppress(OSError):
            os.fchmod(fd, 0o600)
    return fd


def check_private(run_dir: Path, *, foreign: bool = False) -> None:
    """Raise ConfigError if other users can change the run; `foreign`: its owner may."""
    for path, status in _list_entries(run_dir):
        mode = stat.S_IMODE(status.st_mode)
        if not foreign and status.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{path} belongs to user {status.st_uid}, who could change what this process runs "
                f"as user {os.geteuid()}: use the run as that user, or check its content and then "
                f"chown -R {os.geteuid()} {run_dir}"
            )
        if mode & OTHERS_WRITE:
            raise ConfigError(
                f"{path} can be written by other users (mode {mode:04o}), who could change what "
                f"the run executes: check its content, then chmod -R go-w {run_dir}"
            )


def _list_entries(run_dir: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """List the directory, and its entries if other users can reach them."""
    status = run_dir.stat()
    yield run_dir, status
    if not status.st_mode & 0o077:
        return
    for folder, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            path = Path(folder, name)
            with suppress(FileNotFoundError):  # removed since; a link to nothing
                if name not in _UNUSED:
                    yield path, path.stat()
