"""Deduplication of commands, the same for every actor.

Reads   command ids as they arrive, including repeats by a coordinator that came back
Gives   whether to act

Pure. A coordinator repeats every outstanding command after a reconnect. An actor acts once per
command id; the session resends the events that end a command, so a repeated command needs no
repeated answer.
"""

from __future__ import annotations

COMMANDS_REMEMBERED = 65_536
"""Remembered ids, far more than one actor has outstanding (512 trajectories and rewards)."""


class CommandFilter:
    """A memory of the commands that were accepted."""

    def __init__(self, remembered: int = COMMANDS_REMEMBERED) -> None:
        self._seen: dict[int, None] = {}
        self._remembered = remembered

    def accept_id(self, command_id: int) -> bool:
        """Return whether this id is new, and remember it."""
        if command_id in self._seen:
            return False
        self._seen[command_id] = None
        if len(self._seen) > self._remembered:
            del self._seen[next(iter(self._seen))]
        return True
