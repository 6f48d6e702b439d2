"""Why each process was lost last, in words for people.

Reads   events and commands, as the coordinator handles and decides them
Gives   Losses: `why`, by the name of the process, from where it begins to see them
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped


class Losses:
    """How a process ended says nothing where it was killed for a reason that is known."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        self._explained: set[str] = set()  #: by their reason, until their end is reported

    def take(self, stamped: Stamped, commands: Sequence[Command]) -> None:
        event = stamped.event
        if isinstance(event, ev.ActorFailed):
            self._explain(stamped.peer, event.reason)
        elif isinstance(event, ev.HeartbeatLost):
            self._explain(event.actor, f"nothing was heard from it for {event.silent_ms} ms")
        elif isinstance(event, ev.ProcessExited):
            if event.actor not in self._explained:
                self.why[event.actor] = event.reason or _how(event.code)
            self._explained.discard(event.actor)
        elif isinstance(event, ev.ActorJoined):
            self._explained.discard(event.name)
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                self._explain(command.actor, command.reason)

    def _explain(self, name: str, reason: str) -> None:
        self.why[name] = reason
        self._explained.add(name)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
