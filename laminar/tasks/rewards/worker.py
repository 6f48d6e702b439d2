"""The child process that runs reward functions: python -m laminar.tasks.rewards.worker.

Reads   frames on stdin (little-endian u32 length, MessagePack): WorkerStart, then RewardCalls
Gives   frames on stdout: WorkerReady or WorkerRefused, then a CallScored per call; on stderr what
        user code prints, and the stack of the call on STACK_SIGNAL

User code may print, read stdin, hang, leak or crash, so it runs here and not in the process that
holds an engine. The channel is moved away from descriptors 0 and 1 before user code is imported.
It runs under a guard (run/process_guard.py), which ends it when stdin closes, with all processes
that user code has started.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from laminar.config import ConfigError
from laminar.run.fail_points import RUN_VARIABLE, FailPoints
from laminar.run.user_file import describe_error
from laminar.tasks.pipe_frames import encode_frame, read_frame
from laminar.tasks.rewards.results import RewardCall, RewardResult, RewardSpec
from laminar.tasks.rewards.reward_functions import open_scorer

STACK_SIGNAL = signal.SIGUSR1


class WorkerStart(msgspec.Struct, tag="start"):
    spec: RewardSpec


class WorkerReady(msgspec.Struct, tag="ready"):
    """A report that the scorer is open."""


class WorkerRefused(msgspec.Struct, tag="refused"):
    """A report that the scorer cannot be opened."""

    reason: str


class CallScored(msgspec.Struct, tag="scored"):
    results: list[RewardResult]


Reply = WorkerReady | WorkerRefused | CallScored


def main() -> None:
    requests, replies = _take_channel()
    if (body := read_frame(requests)) is not None:
        _serve_calls(msgspec.msgpack.decode(body, type=WorkerStart), requests, replies)


def _serve_calls(start: WorkerStart, requests: BinaryIO, replies: BinaryIO) -> None:
    def send(reply: Reply) -> None:
        replies.write(encode_frame(reply))
        replies.flush()

    try:
        scorer = open_scorer(start.spec)
    except ConfigError as error:
        return send(WorkerRefused(str(error)))
    except BaseException as error:  # the parent shows any error to the user
        kinds = ", ".join(function.kind for function in start.spec.functions)
        return send(WorkerRefused(f"the {kinds} scorer does not load: {describe_error(error, '')}"))
    faulthandler.register(STACK_SIGNAL, all_threads=False)  # imports might replace the handler
    points = FailPoints(Path(run_dir) if (run_dir := os.environ.get(RUN_VARIABLE)) else None)
    send(WorkerReady())
    while (body := read_frame(requests)) is not None:
        call = msgspec.msgpack.decode(body, type=RewardCall)
        points.hit_failpoint("reward-call")
        results = scorer(call)
        points.hit_failpoint("reward-scored")
        send(CallScored(results))


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Take private copies of stdin and stdout, and leave /dev/null and stderr in their place."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    return requests, replies


if __name__ == "__main__":
    main()
