"""The reward workers of a process, and the log of the user's code in them.

Writes  output of the user's code: logs/latest/NAME.reward.log
Gives   make_reward_pool, user_output
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laminar.actors.host import Host
from laminar.run.child_process import Output
from laminar.run.directory import reward_log
from laminar.run.fail_points import RUN_VARIABLE
from laminar.tasks.rewards.reward_functions import reward_spec
from laminar.tasks.rewards.worker_pool import RewardPool

OUTPUT_BYTES_MAX = 8 << 20
"""Bytes of output kept per replica: a thousand replicas may share a file system."""
PIECES_KEPT_MAX = 256
"""Pieces that may wait for the file; each is up to the size of a pipe, 64 KiB."""


def user_output(host: Host) -> Output:
    """Return the receiver of the user code's output in this process's workers, for its log."""
    printed = OutputLog(reward_log(host.run_dir, host.name))
    return host.add_outlet("reward output", printed.write, kept=PIECES_KEPT_MAX).put


def make_reward_pool(host: Host, on_output: Output) -> RewardPool:
    """Return the reward pool of this process (not started)."""
    reward = host.config.reward
    return RewardPool(
        reward_spec(host.config),
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        error_score=reward.error_score,
        max_retries=reward.max_retries,
        env={RUN_VARIABLE: str(host.run_dir)},
        on_output=on_output,
    )


class OutputLog:
    """A log of limited size for the output of reward functions; one process writes it at a time.

    User code may print for days, and not on a terminal. The beginning is kept, because it shows the
    first error.
    """

    def __init__(self, path: Path, bytes_max: int = OUTPUT_BYTES_MAX) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._full = False

    def write(self, pieces: Sequence[bytes]) -> None:
        if self._full:
            return
        data = b"".join(pieces)
        with open(self._path, "ab") as file:
            room = self._bytes_max - file.tell()
            self._full = len(data) > room
            if room > 0:
                file.write(data[:room] + (self._format_truncation() if self._full else b""))

    def _format_truncation(self) -> bytes:
        return f"\n... output beyond {self._bytes_max} bytes is dropped\n".encode()
