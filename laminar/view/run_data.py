"""Data of one run, shared by all open pages of it.

Reads   the facts of a run directory, which follow a live run; its log, for the state at an event
Gives   RunData: tables, the timeline, and the moment of any event; open_runs
Raises  ConfigError for a run that cannot be read

Pages call `refresh` every two seconds; whichever comes first reads the new events, in a thread, and
the others see that `revision` has changed.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from laminar.analysis.facts.reader import Progress, follow_run, load_facts
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events.base import Command, Stamped
from laminar.run.lock import holders
from laminar.view.timeline_data import LaneBook, Timeline, build_timeline

INSTALL = 'pip install "laminar-rl[view]"'
REFRESH_S = 2.0
MOMENTS_KEPT = 8  #: of those asked for last


class Moment(NamedTuple):
    """Event with its decisions, and the state after it."""

    seconds: float
    stamped: Stamped
    commands: list[Command]
    state: State


class RunData:
    """Facts of one run, and what is derived from them once for all pages."""

    def __init__(self, run_dir: Path, progress: Progress | None = None) -> None:
        self.directory = run_dir
        self.name = run_dir.resolve().name
        self.revision = 0
        self._problem = ""  #: why the last refresh failed
        self._facts = (follow_run if holders(run_dir) else load_facts)(run_dir, progress)
        self._lock = threading.Lock()
        self._moments: OrderedDict[int, Moment] = OrderedDict()
        self._due = time.monotonic() + REFRESH_S
        self._derive()

    def table(self, name: str) -> pa.Table:
        """Return a table of facts, as of the last refresh."""
        if name not in self._tables:
            self._tables[name] = self._facts.table(name)
        return self._tables[name]

    @property
    def state(self) -> State:
        """State after the last event."""
        return self._facts.state

    @property
    def first_event(self) -> int:
        return self._facts.begins_at + 1

    @property
    def last_event(self) -> int:
        return self._facts.events

    def find_time(self, event: int) -> float:
        """Return the time of an event; of one before the facts begin, that of the first one."""
        place = int(np.searchsorted(self._numbers, event))
        return float(self._times[min(place, len(self._times) - 1)])

    def refresh(self) -> None:
        """Read what the log has since; at most every two seconds, and never of an ended run."""
        if self.ended or time.monotonic() < self._due or not self._lock.acquire(blocking=False):
            return
        try:
            if self._facts.refresh():
                self._derive()
            self._problem = ""
        except ConfigError as error:
            self._problem = str(error)
        finally:
            self._due = time.monotonic() + REFRESH_S
            self._lock.release()

    def get_moment(self, event: int) -> Moment:
        """Return the moment of an event, by a short replay; those asked for last are kept."""
        with self._lock:
            if event not in self._moments:
                self._moments[event] = self._replay_moment(event)
                while len(self._moments) > MOMENTS_KEPT:
                    self._moments.popitem(last=False)
            self._moments.move_to_end(event)
            return self._moments[event]

    def _replay_moment(self, event: int) -> Moment:
        last: list[tuple[Stamped, list[Command]]] = []

        def observe(stamped: Stamped, commands: list[Command], state: State) -> None:
            last[:] = [(stamped, commands)]

        state = self._facts.state_at(event, observe)
        return Moment(self.find_time(event), *last[0], state)

    def describe_age(self) -> str:
        """Return how old the newest event is, or that the run has ended."""
        if self._problem:
            return f"cannot be read: {self._problem}"
        if self.ended:
            return f"ended after {self._facts.seconds:,.0f} s"
        age = max(time.time() - self._facts.header.last_ns / 1e9, 0.0)
        alive = "live" if holders(self.directory) else "no process of the run is alive"
        return f"{alive}, newest event {age:,.0f} s old"

    def _derive(self) -> None:
        self._tables: dict[str, pa.Table] = {}
        self._numbers: NDArray[np.int64]
        self._times: NDArray[np.float64]
        self._numbers, self._times = self._facts.list_times()
        self.timeline: Timeline = build_timeline(self.table, self._facts.seconds)
        self.lanes = LaneBook()
        self.ended = self._facts.state.run.phase == Phase.ENDED
        self.revision += 1


def open_runs(
    directories: Sequence[Path], progress: Callable[[Path], Progress | None] = lambda _: None
) -> list[RunData]:
    """Open runs; raise ConfigError if the libraries of the page are not installed."""
    for name in ("duckdb", "panel"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"a page of runs needs {name}: install it with `{INSTALL}`"
            ) from error
    return [RunData(directory, progress(directory)) for directory in directories]
