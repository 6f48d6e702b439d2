"""What a machine is and which code it runs, for whoever looks at a run later.

Reads   /proc, git
Gives   hardware, for one line of the log of the machine's node

The file of metrics has figures of steps, the configuration what a user has set: neither is of a
machine, of which a run may have many.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

from laminar.names.version import __version__

GIT_S = 5.0
"""A working directory on a slow file system has no commit, rather than a run that waits."""


def describe_hardware() -> dict[str, Any]:
    """Plain values; what cannot be found out is empty."""
    return {
        "host": socket.gethostname(),
        "cpu": _read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _list_gpu_models(),
        "python": platform.python_version(),
        "laminar": __version__,
        "laminar_commit": commit_of(Path(__file__).parent),
        "directory": str(Path.cwd()),
        "directory_commit": commit_of(Path.cwd()),
    }


def commit_of(directory: Path) -> str:
    """The commit of the git checkout that the directory is in, with `-dirty` where files were
    changed."""
    words = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(
            [*words, "--exclude=*"], capture_output=True, text=True, timeout=GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _read_cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _list_gpu_models() -> list[str]:
    """The models of all that the machine has, as the driver names them."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^Model:\s*(.*)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        found += [model[1]] if model else []
    return found
