"""How much memory the processes of this machine may take together.

Reads   the size of the machine's memory; the limits of our control group, of version 1 or 2
Gives   memory_limit

A container has a limit of its own, which the machine's figures do not show: a process above it is
killed without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit(root: Path = CGROUPS, own: Path = OWN) -> int:
    """The memory that this process may take, in bytes."""
    return min([int(psutil.virtual_memory().total), *_read_limits(root, own)])


def _read_limits(root: Path, own: Path) -> Iterator[int]:
    """The limits of our control group and all above it; "max" is none."""
    for file in _list_limit_files(root, own):
        try:
            text = file.read_text().strip()
        except OSError:  # there is no such group here, or it has no limit
            continue
        if text.isdigit():
            yield int(text)


def _list_limit_files(root: Path, own: Path) -> Iterator[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            base, name = root, "memory.max"
        elif "memory" in kinds.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = Path(group.lstrip("/"))
        yield from (base / above / name for above in (path, *path.parents))
