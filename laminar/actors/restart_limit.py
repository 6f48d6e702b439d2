"""The restart policy: when an ended process is restarted, and when it is given up.

Reads   recovery.max_restarts, recovery.restart_window_s, coordinator.start_timeout_s; the times at
        which it ended
Gives   RestartLimit: the pause before each restart, or the reason against it; decide_node_restart

Pure: nodes use it for their actors, `laminar train` for its nodes, and the simulator for both. The
first restart within the window is immediate: a single end in an hour is rarely the program's fault,
and the run waits for the process. From the second one on there is a pause of 1 s, which doubles up
to 60 s, and up to half of start_timeout_s, the coordinator's limit for a start.

An end that proves nothing about the process does not count: the coordinator gave it up for its
silence, which a network partition explains, or accepts no actors, for example while the run ends;
or the disk of the run failed at its start.
"""

from __future__ import annotations

from laminar.config import Config
from laminar.names import exit_codes

PAUSE_MAX_S = 60.0
TAKEN_S = 10.0  #: lifetime below which a process counts as refused at its start
REFUSED_PAUSE_MIN_S, REFUSED_PAUSE_MAX_S = 1.0, 10.0
"""The pause before a refused process is restarted; doubled each time."""
NODE_ENDS = (
    exit_codes.COMPLETE, exit_codes.PAUSED, exit_codes.USER_ERROR, exit_codes.TERMINATED,
)  # fmt: skip
"""Codes after which a node is not restarted: the run's end, a user's mistake, SIGTERM."""


class RestartLimit:
    """The restarts of one process."""

    def __init__(self, config: Config) -> None:
        self._most = config.recovery.max_restarts
        self._window_s = config.recovery.restart_window_s
        self._pause_max_s = min(PAUSE_MAX_S, config.coordinator.start_timeout_s / 2)
        self._at_s: list[float] = []  #: times of the restarts within the window
        self._refusals = 0  #: refusals in a row

    def record_refusal(self, lived_s: float) -> float:
        """Return the pause before a refused process is restarted, which does not count."""
        self._refusals = self._refusals + 1 if lived_s < TAKEN_S else 0
        if not self._refusals:
            return 0.0
        return min(REFUSED_PAUSE_MIN_S * 2.0 ** min(self._refusals - 1, 10), REFUSED_PAUSE_MAX_S)

    def record_exit(self, now_s: float) -> float | str:
        """Return the pause before a restart, which counts, or the reason against it."""
        self._refusals = 0
        self._at_s = [at_s for at_s in self._at_s if now_s - at_s < self._window_s]
        count = len(self._at_s)
        if count >= self._most:
            times = f"{count} time{'' if count == 1 else 's'} within {self._window_s:g} s"
            return f"it was restarted {times}, and recovery.max_restarts is {self._most}"
        self._at_s.append(now_s)
        return min(2.0 ** min(count - 1, 10), self._pause_max_s) if count else 0.0


def decide_node_restart(
    limit: RestartLimit, code: int, lived_s: float, now_s: float
) -> float | str | None:
    """Return the same for a node with this exit code; None if its end was intended."""
    if code in NODE_ENDS:
        return None
    disk = code == exit_codes.LOG_UNWRITABLE and lived_s < TAKEN_S
    if code == exit_codes.FENCED or disk:
        return limit.record_refusal(lived_s)
    pause_s = limit.record_exit(now_s)
    if code == exit_codes.COORDINATOR_ABSENT and isinstance(pause_s, float):
        return max(pause_s, REFUSED_PAUSE_MIN_S)
    return pause_s
