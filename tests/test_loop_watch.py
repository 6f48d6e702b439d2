"""A loop that stands still: its process writes where it is, once, and says so afterwards."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from laminar.run import loop_watch
from laminar.run.directory import LOGS_DIR
from laminar.run.loop_watch import open_stacks, watch_loop

PROGRAM = """
    import asyncio, sys, threading
    from pathlib import Path
    from laminar.run.loop_watch import open_stacks, watch_loop

    def callback_that_waits():
        threading.Event().wait(1.0)

    async def main():
        said = asyncio.Event()
        report = lambda seconds: (print(seconds), said.set())
        stacks = open_stacks(Path(sys.argv[1]), "x")
        task = asyncio.ensure_future(watch_loop(stacks, 0.2, report))
        await asyncio.sleep(0.1)
        callback_that_waits()
        await said.wait()
        task.cancel()

    asyncio.run(main())
"""


def test_the_stacks_show_the_callback_that_does_not_return(tmp_path: Path) -> None:
    (tmp_path / LOGS_DIR / "latest").mkdir(parents=True)
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    stacks = (tmp_path / LOGS_DIR / "latest" / "x.stacks").read_text()
    assert "callback_that_waits" in stacks and stacks.count("Timeout") >= 1
    assert float(found.stdout.split()[0]) >= 0.2


async def test_a_loop_that_turns_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / LOGS_DIR / "latest").mkdir(parents=True)
    said: list[float] = []
    stacks = open_stacks(tmp_path, "x")
    task = asyncio.ensure_future(watch_loop(stacks, 3_600.0, said.append))
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stacks.close()
    assert not said and not (tmp_path / LOGS_DIR / "latest" / "x.stacks").read_text()


def test_a_full_disk_leaves_the_terminal(tmp_path: Path) -> None:
    assert open_stacks(tmp_path / "nowhere", "x") is sys.stderr
    assert loop_watch.DUMPS_MAX > 0
