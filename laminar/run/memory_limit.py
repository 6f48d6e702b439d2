"""The memory that the processes of this machine may use together, and a limit for one of them.

Reads   the machine's memory size; the limits of the control group, version 1 or 2
Gives   memory_limit; limit_memory

A container may have a lower limit than the machine's figures show; the kernel kills a process
that exceeds it without any message.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit(root: Path = CGROUPS, own: Path = OWN) -> int:
    """Return the memory that this process may use, in bytes."""
    import psutil  # not for those that only limit themselves

    return min([int(psutil.virtual_memory().total), *_read_limits(root, own)])


def _read_limits(root: Path, own: Path) -> Iterator[int]:
    """Yield the limits of this process's control group and all its parents; "max" means none."""
    for file in _list_limit_files(root, own):
        try:
            text = file.read_text().strip()
        except OSError:  # no such group here, or no limit
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


def limit_memory(limit_mb: int) -> None:
    """Limit private writable memory, on top of that taken by imports; 0 means no limit.

    Reserved memory and mapped files are not counted. Each child has the same limit.
    """
    if not limit_mb:
        return
    with open("/proc/self/status") as status:
        (taken,) = (line.split()[1] for line in status if line.startswith("VmData:"))
    limit = int(taken) * 1024 + (limit_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
