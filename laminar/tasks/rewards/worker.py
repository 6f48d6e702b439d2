"""The child process that runs reward functions, started by run/child_process.py.

Reads   messages of its parent: RewardSpec, then RewardCalls
Gives   Ready or Refused, then a CallScored per call; on stderr what user code prints, and the
        stack of the call on STACK_SIGNAL

User code may print, read stdin, hang, leak or crash, so it runs here and not in the process that
holds an engine. It runs under a guard (run/process_guard.py), which ends it when the channel
closes, with all processes that user code has started.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import msgspec

from laminar.config import ConfigError
from laminar.run.child_channel import Ready
from laminar.run.child_process import connect_user_code
from laminar.run.fail_points import RUN_VARIABLE, FailPoints
from laminar.run.user_file import describe_error
from laminar.tasks.rewards.results import RewardCall, RewardResult, RewardSpec, Scorer
from laminar.tasks.rewards.reward_functions import open_scorer

STACK_SIGNAL = signal.SIGUSR1


class CallScored(msgspec.Struct, tag="scored"):
    results: list[RewardResult]


def main(fd: str, parent: str) -> None:
    channel = connect_user_code(fd, parent)
    if (spec := channel.receive(RewardSpec)) is None:
        return
    with channel.refuse_errors():
        scorer = _open_scorer(spec)
    faulthandler.register(STACK_SIGNAL, all_threads=False)  # imports might replace the handler
    points = FailPoints(Path(run_dir) if (run_dir := os.environ.get(RUN_VARIABLE)) else None)
    channel.send(Ready())

    def score(call: RewardCall) -> CallScored:
        points.hit_failpoint("reward-call")
        results = scorer(call)
        points.hit_failpoint("reward-scored")
        return CallScored(results)

    channel.serve_requests(RewardCall, score)


def _open_scorer(spec: RewardSpec) -> Scorer:
    """Open the scorer; raise ConfigError for any error, which the parent shows to the user."""
    try:
        return open_scorer(spec)
    except ConfigError:
        raise
    except BaseException as error:
        kinds = ", ".join(function.kind for function in spec.functions)
        raise ConfigError(
            f"the {kinds} scorer does not load: {describe_error(error, '')}"
        ) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
