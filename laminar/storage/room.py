"""Whether a write failed because there is no room, or for a reason that no waiting mends.

Reads   what the operating system or SQLite raised
"""

from __future__ import annotations

import errno
import sqlite3

_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_SQLITE_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


def no_room(error: BaseException) -> bool:
    """The disk, or a quota on it, is full; what was being written is undone or was never begun."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) in _SQLITE_CODES
    return isinstance(error, OSError) and error.errno in _ERRNOS
