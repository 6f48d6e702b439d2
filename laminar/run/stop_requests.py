"""Requests to end a process of a run: signals, and lines from the process that started it.

Reads   signals; lines on standard input, written by the starter
Gives   stop_signals, pause_signals, leave_signals, handle_signals, follow_starter

A batch system warns a process with SIGUSR1 (SIGTERM if nothing else was agreed on) and restarts it
later, so its warning pauses the run instead of ending it.

A process that another one of the run started reads its standard input: each line is a request,
and its end means that the starter is gone. Unlike a signal, a line is not lost while a process
still imports; unlike a parent-death signal, the end is seen whichever thread started the process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
from collections.abc import Callable

from laminar.config import Config

PAUSE, DRAIN, NOW = "pause", "drain", "now"
"""Requests: complete and save the step in training; complete it and export; end at once.

A reason may follow.
"""
END = signal.SIGUSR2  #: the signal for a graceful end of the run, also under a batch system
STARTER_GONE = ""


def add_child_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that a process of a run passes to the processes it starts."""
    parser.add_argument("--lock-fd", type=int, default=None, help=argparse.SUPPRESS)


def drop_ignored(*signals: signal.Signals) -> list[signal.Signals]:
    """Return the signals that are not ignored: `nohup` ignores SIGHUP, a script's `&` SIGINT."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def in_batch_job() -> bool:
    """Return whether a batch system started this process and limits its run time."""
    return "SLURM_JOB_ID" in os.environ


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run gracefully, for the process that decides it."""
    term = [] if in_batch_job() else [signal.SIGTERM]
    return [*term, END, *drop_ignored(signal.SIGHUP)]


def pause_signals() -> list[signal.Signals]:
    """Return the signals that pause a run, for the process that decides it."""
    return [signal.SIGUSR1, *([signal.SIGTERM] if in_batch_job() else [])]


def get_pause_timeout_ms(config: Config, asked_by: str) -> int:
    """Return how long a pause may wait for responses that could not be resumed later.

    Half of the time between a batch system's warning and the kill; 0 after SIGTERM.
    """
    return 0 if asked_by == signal.SIGTERM.name else config.slurm.signal_before_s * 500


def leave_signals(*, warned: bool) -> list[signal.Signals]:
    """Return the signals on which an actor leaves the run; `warned`: a batch system warns it."""
    usr1 = [signal.SIGUSR1] if warned else []
    return [signal.SIGTERM, *usr1, *drop_ignored(signal.SIGHUP)]


def handle_signals(signals: list[signal.Signals], act: Callable[[str], None]) -> None:
    """Call `act` with the signal's name for each of these signals, in the running event loop."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, act, number.name)


def follow_starter(act: Callable[[str], None]) -> None:
    """Call `act` in the running event loop with each request, and with STARTER_GONE at the end.

    A thread reads, since the loop may be busy; requests after the loop's end are dropped.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        with open(os.dup(0), encoding="utf-8") as lines:
            for line in lines:
                _call_in_loop(loop, act, line.strip())
        _call_in_loop(loop, act, STARTER_GONE)

    threading.Thread(target=read, name="follow-starter", daemon=True).start()


def _call_in_loop(loop: asyncio.AbstractEventLoop, act: Callable[[str], None], word: str) -> None:
    try:
        loop.call_soon_threadsafe(act, word)
    except RuntimeError:  # the loop is closed: this process is ending already
        pass
