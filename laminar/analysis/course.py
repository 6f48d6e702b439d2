"""How long answers took from their first placement to their last token, and what repack did.

Reads   a replay
Gives   Course; `facts`, its figures for the summary
"""

from __future__ import annotations

from typing import Any

from laminar.analysis.lives import FINISHED, Lives, Moments
from laminar.analysis.repack_book import RepackBook
from laminar.core.state import State
from laminar.events.base import Command, Stamped
from laminar.names.ids import Purpose


class Course:
    """An observer of a replay."""

    def __init__(self) -> None:
        self.moments, self.repack = Moments(), RepackBook()
        self._lives = Lives()
        self._count, self._sum_ns, self._max_ns = 0, 0, 0  #: of training answers

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self.moments.at(stamped)
        changes = self._lives.take(now, stamped.event, commands, state)
        for what, life in changes:
            if what == FINISHED and life.purpose == Purpose.TRAIN:
                took_ns = now.unix_ns - life.placements[0].dispatched.unix_ns
                self._count += 1
                self._sum_ns += took_ns
                self._max_ns = max(self._max_ns, took_ns)
        self.repack.take(now, stamped, commands, changes, state)

    def facts(self) -> dict[str, Any]:
        count = self._count
        return {
            "latency_s_mean": self._sum_ns / count / 1e9 if count else None,
            "latency_s_max": self._max_ns / 1e9 if count else None,
            "repack": self.repack.facts(),
        }
