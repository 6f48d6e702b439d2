"""Check of commands that are carried out: each once.

Reads   who acts on which command
Raises  Violation

The ends of trajectories are the exception: when the store has died before it said that it had
written them, its next process writes them again.
"""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events.base import Command
from laminar.sim.runtime.violation import Violation


class Acted:
    """What has been acted on in one run."""

    def __init__(self) -> None:
        self._acted: dict[tuple[int, str], None] = {}

    def note(self, command_id: int, command: Command, name: str, boot_id: str) -> None:
        """acted_once: every command is acted on at most once."""
        by = boot_id if isinstance(command, cmd.EndTrajectories) else ""
        if (command_id, by) in self._acted:
            what = f"{name} acted twice on command {command_id} of event {command_id >> 20}"
            raise Violation("acted_once", what, name)
        self._acted[command_id, by] = None
