"""The engines in a trace: what they hold and run as charts, hand-overs as spans.

Reads   events and commands of a replay, and the state after each
Writes  to the tracks: figures of each replica where they change; a span from the order to give
        everything away until all of it goes on elsewhere
"""

from __future__ import annotations

from laminar.analysis.tracks import Span, Tracks
from laminar.core.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped

HAND_OVER = "hand-over"


class EngineTracks:
    """Of all replicas."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._giving: dict[str, Span] = {}  #: by replica that hands its work over
        self._figures: dict[str, tuple[int, ...]] = {}  #: the last ones by replica

    def take(self, stamped: Stamped, us: float, commands: list[Command], state: State) -> None:
        """Enter one event."""
        if isinstance(stamped.event, ev.TokenProgress):
            self._gauge(stamped.peer, stamped.event, us)
        for name in list(self._giving):
            if name not in state.replicas or not state.replicas[name].given:
                self._tracks.end(self._giving.pop(name), us, event=stamped.seq)
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self._ordered(command, stamped.seq, us, state)

    def _ordered(self, command: cmd.ReleaseTrajectories, seq: int, us: float, state: State) -> None:
        destination = state.progress[command.items[0].trajectory_id].destination
        span = self._giving[command.to] = (command.to, HAND_OVER, HAND_OVER)
        self._tracks.begin(span, us, f"gives {len(command.items)} to {destination}", event=seq)

    def _gauge(self, replica: str, event: ev.TokenProgress, us: float) -> None:
        figures = event.kv_used_tokens, event.running, event.waiting
        if self._figures.get(replica) != figures:
            self._figures[replica] = figures
            self._tracks.count(replica, us, "cache", tokens=event.kv_used_tokens)
            running, waiting = event.running, event.waiting
            self._tracks.count(replica, us, "sequences", running=running, waiting=waiting)
