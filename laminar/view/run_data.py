"""Data of one run, shared by all open pages of it.

Reads   the facts of a run directory, which follow a live run; its store and status
Gives   RunData: tables, the timeline, and the moment of any event; open_runs
Raises  ConfigError for a run that cannot be read

Pages call `refresh` every two seconds; whichever comes first reads the new events, in a thread, and
the others see that `revision` has changed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from laminar.analysis.facts.reader import follow_run
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.run.lock import holders
from laminar.view.timeline_data import LaneBook, Timeline, build_timeline

REFRESH_S = 2.0
STATES_KEPT = 8  #: of the moments asked for last


class RunData:
    """Facts of one run, and what is derived from them once for all pages."""

    def __init__(self, run_dir: Path, report: Callable[[str], None]) -> None:
        self.directory = run_dir
        self.name = run_dir.resolve().name
        self.revision = 0
        self.problem = ""  #: why the last refresh failed
        self._facts = follow_run(run_dir, report=report)
        self._lock = threading.Lock()
        self._states: OrderedDict[int, State] = OrderedDict()
        self._due = time.monotonic() + REFRESH_S
        self._derive()

    def table(self, name: str) -> pa.Table:
        return self._facts.table(name)

    @property
    def last_event(self) -> int:
        numbers = self.table("events")["event"]
        return int(numbers[-1].as_py()) if len(numbers) else 0

    def refresh(self) -> None:
        """Read what the log has since; at most every two seconds, and never of an ended run."""
        if self.ended or time.monotonic() < self._due or not self._lock.acquire(blocking=False):
            return
        try:
            before = self.last_event
            self._facts.refresh()
            if self.last_event != before:
                self._derive()
            self.problem = ""
        except ConfigError as error:
            self.problem = str(error)
        finally:
            self._due = time.monotonic() + REFRESH_S
            self._lock.release()

    def get_state(self, event: int) -> State:
        """Return the state after an event; those asked for last are kept."""
        with self._lock:
            if event not in self._states:
                self._states[event] = self._facts.state_at(event)
                while len(self._states) > STATES_KEPT:
                    self._states.popitem(last=False)
            self._states.move_to_end(event)
            return self._states[event]

    def describe_age(self) -> str:
        """Return how old the newest event is, or that the run has ended."""
        if self.problem:
            return f"cannot be read: {self.problem}"
        if self.ended:
            return "ended"
        age = max(time.time() - self._facts.last_unix_s, 0.0)
        alive = "" if holders(self.directory) else ", no process of the run is alive"
        return f"newest event {age:.0f} s old{alive}"

    def _derive(self) -> None:
        self.timeline: Timeline = build_timeline(self.table)
        self.lanes = LaneBook()
        self.ended = self._facts.state.run.phase == Phase.ENDED
        self.revision += 1


def open_runs(directories: Sequence[Path], report: Callable[[str], None]) -> list[RunData]:
    """Open runs, and report the progress of facts that have to be built."""
    return [RunData(directory, report) for directory in directories]


Tables = Callable[[str], pa.Table]


def find_row(table: pa.Table, place: int) -> dict[str, Any]:
    """Return a row of a table as a dict."""
    row: dict[str, Any] = table.slice(place, 1).to_pylist()[0]
    return row
