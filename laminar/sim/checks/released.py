"""Check of what is handed over: the store has every token of it before it goes on elsewhere.

Reads   decisions, what engines had sampled when they were told to stop, the store's rows
Raises  Violation
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.sim.runtime.violation import Violation
from laminar.storage.rules import Row


class Released:
    """Of one run."""

    def __init__(self) -> None:
        self._ordered: set[tuple[str, int]] = set()  #: trajectory and placement to be handed over
        self._sampled: dict[str, int] = {}  #: tokens by the engine's name for it, when it stopped

    def stopped(self, request_id: str, tokens: int) -> None:
        """An engine forgets it, with so many tokens of the response sampled."""
        self._sampled[request_id] = tokens

    def observe(self, event: Event, commands: list[Command], rows: Mapping[str, Row]) -> None:
        """released_is_stored: what its replica has let go of goes on with all that was sampled.

        Without an answer in time it goes on with less, and is taken back from its replica."""
        answered = isinstance(event, ev.TrajectoriesReleased)
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self._ordered.update((item.trajectory_id, item.placement) for item in command.items)
            elif isinstance(command, cmd.AbortTrajectories):
                taken = {(item.trajectory_id, item.placement) for item in command.items}
                self._ordered.difference_update(taken)
            elif isinstance(command, cmd.GenerateTrajectory) and answered:
                self._goes_on(command, rows)

    def _goes_on(self, command: cmd.GenerateTrajectory, rows: Mapping[str, Row]) -> None:
        before = (command.trajectory_id, command.placement - 1)
        sampled = self._sampled.get(f"{command.trajectory_id}@{command.placement - 1}", 0)
        if before not in self._ordered or not sampled:
            return
        row = rows.get(command.trajectory_id)
        if row is None or row.num_tokens < sampled:
            what = f"{sampled} tokens were sampled when it was released, the store has {row}"
            raise Violation("released_is_stored", what, command.trajectory_id)
