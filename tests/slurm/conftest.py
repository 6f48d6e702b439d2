"""These tests need a Slurm, `make test-slurm`: tools/kit/local_slurm.sh makes one of virtual
nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run.conftest import ROOT

NODES = 4
WAIT_S = 300
"""A node is down for Slurm after ten seconds, and three machines of a run share two cores here."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("slurmctld", "slurmd", "munged") if not _installed(name)]
    reason = f"no {', '.join(missing)} here: apt-get install slurmctld slurmd slurm-client munge"
    if not missing and os.geteuid() != 0:
        missing, reason = ["root"], "the nodes of the virtual Slurm are namespaces, made by root"
    for item in items:
        if missing and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))


def _installed(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None


class Lab:
    """A Slurm of this machine, and where its runs are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs = directory / "runs"

    def node(self, command: str, *words: str) -> None:
        """local_slurm.sh COMMAND of this Slurm."""
        program = [
            str(ROOT / "tools" / "kit" / "local_slurm.sh"),
            command,
            str(self.directory),
            *words,
        ]
        subprocess.run(program, check=True, timeout=WAIT_S)

    def queue(self) -> dict[str, tuple[str, str]]:
        """State and node of each job, array tasks by themselves."""
        done = subprocess.run(
            ["squeue", "-h", "-o", "%i|%T|%N"], check=True, capture_output=True, text=True
        )
        rows = [line.split("|") for line in done.stdout.splitlines()]
        return {job: (state, node) for job, state, node in rows}


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    lab = Lab(Path(tempfile.mkdtemp(prefix="lab-")))  # the names of sockets are short
    before = os.environ.copy()
    try:
        lab.node("start", "--nodes", str(NODES), "--gpus", "2")
        os.environ["SLURM_CONF"] = str(lab.directory / "slurm.conf")
        yield lab
    finally:
        lab.node("stop")
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(lab.directory)


def until(what: Callable[[], bool], said: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s until {said}"
        time.sleep(0.2)
