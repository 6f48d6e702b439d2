"""The child process that runs reward functions: python -m laminar.tasks.rewards.worker.

Reads   frames on stdin (little-endian u32 length, MessagePack): Start, then RewardCalls, one each
Gives   frames on stdout: Ready or Refused, then one Scored per call; user code prints to stderr,
        as does STACK_SIGNAL: where the call is

User code may print, read stdin, hang, leak or crash, so it runs here and not in the process that
holds an engine. The channel is moved away from descriptors 0 and 1 before user code is imported,
and the process does not outlive its parent: a thread ends it when stdin closes, and if a function
never gives the interpreter back to that thread, a timer that needs no interpreter does.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import time
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
END_GRACE_S = 1.0  #: from the end of stdin to the kill, so that an idle worker ends by itself


class WorkerStart(msgspec.Struct, tag="start"):
    spec: RewardSpec
    limit_s: float  #: a call that runs longer has lost its parent, which would have killed it


class WorkerReady(msgspec.Struct, tag="ready"):
    """The scorer is open."""


class WorkerRefused(msgspec.Struct, tag="refused"):
    """The scorer cannot be opened."""

    reason: str


class CallScored(msgspec.Struct, tag="scored"):
    results: list[RewardResult]


Reply = WorkerReady | WorkerRefused | CallScored


def main() -> None:
    requests, replies = _take_channel()
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, inbox), daemon=True).start()
    body = inbox.get()
    if body is not None:
        _serve_calls(msgspec.msgpack.decode(body, type=WorkerStart), inbox, replies)


def _serve_calls(
    start: WorkerStart, inbox: queue.SimpleQueue[bytes | None], replies: BinaryIO
) -> None:
    def send(reply: Reply) -> None:
        replies.write(encode_frame(reply))
        replies.flush()

    try:
        scorer = open_scorer(start.spec)
    except ConfigError as error:
        return send(WorkerRefused(str(error)))
    except BaseException as error:  # whatever it is, the parent shall be able to show it
        kinds = ", ".join(function.kind for function in start.spec.functions)
        return send(WorkerRefused(f"the {kinds} scorer does not load: {describe_error(error, '')}"))
    faulthandler.register(STACK_SIGNAL, all_threads=False)  # after imports, which might take it
    points = FailPoints(Path(run_dir) if (run_dir := os.environ.get(RUN_VARIABLE)) else None)
    send(WorkerReady())
    while (body := inbox.get()) is not None:
        call = msgspec.msgpack.decode(body, type=RewardCall)
        faulthandler.dump_traceback_later(start.limit_s, exit=True)
        points.hit_failpoint("reward-call")
        results = scorer(call)
        points.hit_failpoint("reward-scored")
        faulthandler.cancel_dump_traceback_later()
        send(CallScored(results))


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of stdin and stdout; what is left is /dev/null and stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def _read_requests(requests: BinaryIO, inbox: queue.SimpleQueue[bytes | None]) -> None:
    """Frames to the inbox; at the end of stdin the whole process group goes, whatever runs."""
    while (body := read_frame(requests)) is not None:
        inbox.put(body)
    inbox.put(None)
    time.sleep(END_GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
