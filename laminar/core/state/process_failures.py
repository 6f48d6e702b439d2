"""The reason for the last loss of each process, for people; no decision depends on it.

Reads   events and commands, as they are handled and decided, or replayed
Gives   ProcessFailures

Used by status.json and by the summary, which is computed from the log. A process that ends
gracefully is not lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names import exit_codes
from laminar.names.process_end import describe_exit


class ProcessFailures:
    """The reason for the last loss of each process, for people: `why`, by its name.

    An exit code is ignored if the process was killed for a known reason."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        self._explained: set[str] = set()  #: names with a known reason, until their end is reported
        self._boots: dict[str, str] = {}  #: boots that joined last, by name
        self._replaced: set[str] = set()  #: boots whose end is already known

    def record_event(self, stamped: Stamped, commands: Sequence[Command]) -> None:
        event = stamped.event
        if isinstance(event, ev.ActorFailed):
            self._record_reason(stamped.peer, event.reason)
        elif isinstance(event, ev.HeartbeatLost):
            self._record_reason(event.actor, f"nothing was heard from it for {event.silent_ms} ms")
        elif isinstance(event, ev.ProcessExited):
            self._record_exit(event)
        elif isinstance(event, ev.ActorJoined):
            self._explained.discard(event.name)
            if (before := self._boots.get(event.name, event.boot_id)) != event.boot_id:
                self._replaced.add(before)
            self._boots[event.name] = event.boot_id
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                self._record_reason(command.actor, command.reason)

    def _record_reason(self, name: str, reason: str) -> None:
        self.why[name] = reason
        self._explained.add(name)

    def _record_exit(self, event: ev.ProcessExited) -> None:
        if event.boot_id in self._replaced:
            self._replaced.remove(event.boot_id)
            return
        if event.actor not in self._explained and event.code != exit_codes.COMPLETE:
            self.why[event.actor] = event.reason or describe_exit(event.code)
        self._explained.discard(event.actor)
