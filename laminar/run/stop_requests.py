"""How a process of a run is asked to end from outside: by signals, and by the process that started
it.

Reads   signals; lines on standard input, where the starter of a process has the other end
Gives   stop_signals, pause_signals, leave_signals, handle_signals, follow_starter

A batch system warns a process with SIGUSR1, or with SIGTERM where nothing else was agreed on, and
starts it again later: that is a pause of the run, and not its end.

A process that another one of the run started reads its standard input: one line is one request,
and its end says that the starter is gone. Unlike a signal, a line is not lost while a process
still imports, and unlike a parent-death signal the end is seen whatever thread did the start.
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
"""Requests: complete and save the step in training; complete it and export; end at once. A reason
may follow."""
END = signal.SIGUSR2
"""Asks for a graceful end of the run wherever that is decided, also under a batch system."""
STARTER_GONE = ""


def add_child_option(parser: argparse.ArgumentParser) -> None:
    """What a process of a run passes to those that it starts."""
    parser.add_argument("--lock-fd", type=int, default=None, help=argparse.SUPPRESS)


def drop_ignored(*signals: signal.Signals) -> list[signal.Signals]:
    """The signals that were not ignored when this process began: `nohup` ignores SIGHUP, a script's
    `&` SIGINT, and it stays so."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def in_batch_job() -> bool:
    """Whether a batch system has started this process, and decides how long it may run."""
    return "SLURM_JOB_ID" in os.environ


def stop_signals() -> list[signal.Signals]:
    """What asks for a graceful end of the run, where that is decided."""
    term = [] if in_batch_job() else [signal.SIGTERM]
    return [*term, END, *drop_ignored(signal.SIGHUP)]


def pause_signals() -> list[signal.Signals]:
    """What asks for a pause of the run, likewise."""
    return [signal.SIGUSR1, *([signal.SIGTERM] if in_batch_job() else [])]


def get_pause_timeout_ms(config: Config, asked_by: str) -> int:
    """How long a pause may wait for answers that could not go on later: half of the notice that a
    batch system gives; after SIGTERM it gives none."""
    return 0 if asked_by == signal.SIGTERM.name else config.slurm.notice_s * 500


def leave_signals(*, warned: bool) -> list[signal.Signals]:
    """What asks an actor to leave the run; `warned`: it is one that a batch system warns."""
    usr1 = [signal.SIGUSR1] if warned else []
    return [signal.SIGTERM, *usr1, *drop_ignored(signal.SIGHUP)]


def handle_signals(signals: list[signal.Signals], act: Callable[[str], None]) -> None:
    """Call `act` with the name of each of these signals, in the running event loop."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, act, number.name)


def follow_starter(act: Callable[[str], None]) -> None:
    """Call `act` in the running event loop with each request, and with STARTER_GONE at the end.

    A thread reads, since the loop may be busy; what comes after the loop's end is dropped.
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
    except RuntimeError:  # the loop is closed: this process ends already
        pass
