"""What repack does while a run works: replicas emptied, trajectories moved; for people.

Reads   commands, as the coordinator decides them, and the state after them
Gives   RepackCounts, counted from where it begins to see them
"""

from __future__ import annotations

from laminar.core.state import State
from laminar.events import commands as cmd
from laminar.events.base import Command


class RepackCounts:
    """Zeros while the run has no repack."""

    def __init__(self) -> None:
        self.emptied = self.moves = 0

    def take(self, commands: list[Command], state: State) -> None:
        if not state.settings.repack_policy:
            return
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self.emptied += 1
            elif isinstance(command, cmd.GenerateTrajectory):
                progress = state.progress.get(command.trajectory_id)
                self.moves += progress is not None and bool(progress.source)

    def drain(self) -> dict[str, float]:
        """The figures of a step; then it begins again."""
        found = {"repack/emptied": float(self.emptied), "repack/moves": float(self.moves)}
        self.emptied = self.moves = 0
        return found
