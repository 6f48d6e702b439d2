"""Cost of an environment's tool calls, and how the calls ended.

Reads   the event log, by replay; the calls of RUN/store.sqlite
Gives   ToolCallStats, an observer whose `compute_summary` is the part `calls` of the summary

The log does not contain calls, since no decision depends on one. They are therefore kept out of
ledger_book.py, which checks the log alone.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from laminar.core.state.state import State
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.reasons import EndedBy
from laminar.run.directory import STORE_FILE
from laminar.storage import books


class ToolCallStats:
    """Counter of the turns in the log."""

    def __init__(self) -> None:
        self._environment = False
        self._turns = 0
        self._read_again = 0
        self._ended_by: Counter[str] = Counter()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        event = stamped.event
        self._environment = state.settings.has_environment
        if isinstance(event, ev.TrajectoryStarted):
            trajectory = state.work.trajectories.get(event.trajectory_id)
            if trajectory is not None and trajectory.placement == event.placement:
                again = event.tokens_resumed > 0
                self._read_again += (event.prompt_tokens + event.tokens_resumed) * again
        elif isinstance(event, ev.TurnRequested):
            self._turns += event.turn > 0
        elif isinstance(event, ev.TrajectoryRewarded) and event.ended_by != EndedBy.NONE:
            self._ended_by[event.ended_by] += 1

    def compute_summary(self, run_dir: Path) -> dict[str, Any] | None:
        """Return the figures, None without an environment; `seconds_*` cover finished calls."""
        if not self._environment or not (run_dir / STORE_FILE).is_file():
            return None
        with books.open_tables(run_dir / STORE_FILE) as tables:
            calls = tables.turns.list_call_ends()
        seconds = [taken for status, taken in calls if status not in ("intended", "lost")]
        p50, p99 = np.percentile(seconds, [50, 99]).tolist() if seconds else (None, None)
        return {
            "made": len(calls),
            "by_end": dict(Counter(status for status, _ in calls)),
            "seconds_p50": p50,
            "seconds_p99": p99,
            "turns_continued": self._turns,
            "tokens_read_again": self._read_again,
            "ended_by": dict(self._ended_by),
        }
