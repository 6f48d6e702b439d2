"""Collector of the facts about a run: a replay observer that adds rows to the tables.

Reads   the events and commands of a replay, and the state after each
Gives   FactCollector

A row is added when it is complete; `list_open` gives those that are not, such as trajectories that
have not ended. Memory therefore depends on the work that is open at one time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.process_facts import ProcessFacts
from laminar.analysis.facts.repack_facts import RepackFacts
from laminar.analysis.facts.replica_facts import ReplicaFacts
from laminar.analysis.facts.tables import TABLES, Add, Row
from laminar.analysis.facts.training_facts import TrainingFacts
from laminar.analysis.facts.trajectory_history import HistoryTracker
from laminar.analysis.facts.weight_facts import WeightFacts
from laminar.analysis.facts.work_facts import GroupFacts, MessageFacts, MoveReasons
from laminar.analysis.log.event_clock import EventClock
from laminar.core.state.state import State
from laminar.events.base import Command, Stamped


class FactCollector:
    """Replay observer that passes the values of rows to `add`."""

    def __init__(self, add: Add) -> None:
        def add_row(name: str, row: Any) -> None:
            add(name, TABLES[name].list_values(row))

        self.clock = EventClock()
        self._lives = HistoryTracker(add_row)
        self._moves = MoveReasons()
        self._messages = MessageFacts(add_row)
        self._parts = (
            GroupFacts(add_row),
            ReplicaFacts(add_row),
            TrainingFacts(add_row),
            WeightFacts(add_row),
            RepackFacts(add_row),
            ProcessFacts(add_row),
        )

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self.clock.locate_event(stamped)
        changes = self._lives.record_event(now, stamped, commands, state)
        at = Happening(now, stamped, commands, state, changes)
        self._messages.record(at)
        self._moves.record(at)
        for part in self._parts:
            part.record(at)

    def begin_with(self, state: State) -> None:
        """Take over the open trajectories of a state, where the log before it is gone."""
        self._lives.begin_with(state)

    def list_open(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows that are not complete, with the name of their table."""
        for part in (self._lives, *self._parts):
            for name, row in part.list_open():
                yield name, TABLES[name].list_values(row)
