"""What asks a process to end: signals that were not ignored, and the one that started it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CHILD = """
import asyncio
from laminar.run.stop_requests import STARTER_GONE, follow_starter, handle_signals, stop_signals

async def main():
    ended = asyncio.Event()
    def act(word):
        print(f"heard {word!r}", flush=True)
        if word == STARTER_GONE:
            ended.set()
    handle_signals(stop_signals(), act)
    follow_starter(act)
    print("ready", flush=True)
    await ended.wait()

asyncio.run(main())
"""
NOHUP = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(*%r)"


def child(*, nohup: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD]
    if nohup:
        command = [sys.executable, "-c", NOHUP % ((sys.executable, command),)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def test_what_the_starter_wrote_before_the_child_could_read_is_not_lost() -> None:
    said, _ = child().communicate("drain SIGTERM\nnow SIGINT\n", timeout=20)
    assert said.splitlines() == ["ready", "heard 'drain SIGTERM'", "heard 'now SIGINT'", "heard ''"]


@pytest.mark.parametrize("nohup", [False, True])
def test_sighup_is_treated_like_sigterm_unless_it_was_ignored(nohup: bool) -> None:
    process = child(nohup=nohup)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    if not nohup:
        assert process.stdout.readline() == "heard 'SIGHUP'\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "heard 'SIGTERM'\n"
    said, _ = process.communicate("", timeout=20)
    assert said == "heard ''\n"
    assert process.returncode == 0
