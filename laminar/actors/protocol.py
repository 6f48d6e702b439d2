"""What every actor does with commands, without doing any of it: once each, in order.

Reads   command ids as they arrive, also from a coordinator that came back and sends them again
Gives   whether to act

Pure. A coordinator repeats every outstanding command after a reconnect. An actor acts once per
command id; the events that end a command are resent by the session, so a repeated command needs no
repeated answer.
"""

from __future__ import annotations

COMMANDS_REMEMBERED = 65_536
"""Far more than one actor has outstanding (512 trajectories and their rewards)."""


class CommandFilter:
    """Remembers which commands were taken."""

    def __init__(self, remembered: int = COMMANDS_REMEMBERED) -> None:
        self._seen: dict[int, None] = {}
        self._remembered = remembered

    def accept_id(self, command_id: int) -> bool:
        """True the first time that this id is seen."""
        if command_id in self._seen:
            return False
        self._seen[command_id] = None
        if len(self._seen) > self._remembered:
            del self._seen[next(iter(self._seen))]
        return True
