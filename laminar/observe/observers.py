"""The observers of a coordinator, called in its turn: they collect, and can break nothing.

Reads   every event with its decisions and the state after it
Gives   the same to each observer; an exception of one is counted and logged once per kind

What they collect goes into outlets of the telemetry (observe/telemetry.py), whose thread writes it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from laminar.core.state import State
from laminar.eventlog.replay import Observer
from laminar.events.base import Command, Stamped


class Observers:
    """Several observers as one that never raises."""

    def __init__(self, log: Any, **observers: Observer) -> None:
        self._log, self._observers = log, observers
        self.failed: Counter[tuple[str, type[Exception]]] = Counter()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        for name, observer in self._observers.items():
            try:
                observer(stamped, commands, state)
            except Exception as error:
                self.failed[name, type(error)] += 1
                if self.failed[name, type(error)] == 1:
                    fields = {"observer": name, "event_seq": stamped.seq}
                    self._log.error("observer-failed", **fields, exc_info=error)
