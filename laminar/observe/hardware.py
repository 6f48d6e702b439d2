"""A description of a machine and of the code it runs.

Reads   /proc, git
Gives   describe_hardware, for one line of the log of the machine's node

The metrics describe steps and the configuration describes settings; this describes a machine, of
which a run may have many.
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

GIT_S = 5.0  #: time limit for git; on a slow file system the commit is left empty


def describe_hardware() -> dict[str, Any]:
    """Return plain values; unknown ones are empty."""
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
    """Return the commit of the directory's git checkout, with `-dirty` if files were changed."""
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
    """Return the models of all GPUs of the machine, as the driver names them."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^Model:\s*(.*)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        found += [model[1]] if model else []
    return found
