"""Whether a write failed because there is no room, or for a reason that no waiting mends.

Reads   what the operating system raised, or what stands for it (ports.DiskError)
"""

from __future__ import annotations

import errno

_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def no_room(error: BaseException) -> bool:
    """The disk, or a quota on it, is full; what was being written is undone or was never begun."""
    return isinstance(error, OSError) and error.errno in _ERRNOS
