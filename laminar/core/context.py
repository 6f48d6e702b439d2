"""The context of one event: the state, the cause, and the commands decided so far.

Reads   state, the stamped event
Writes  state.orders.commands, state.orders.timers, state.run.ignored
Emits   the commands that handlers issue with `issue_command`

Every function that decides takes a Context, so that every command carries its cause.
"""

from __future__ import annotations

from laminar.core.state import indexes, keys
from laminar.core.state.failures import Failure
from laminar.core.state.keys import CommandKey, OutstandingCommand, TimerName
from laminar.core.state.state import State
from laminar.events.base import Command, Stamped
from laminar.events.commands import AnyCommand, RestartActor, TrajectoryEnding

COMMANDS_PER_EVENT_MAX = 1 << 20
"""Commands per event; command_id = event seq * 2**20 + index, so both can be read off it."""
RESTART_TIMEOUT_MS = 60_000
"""Timeout of a restart: a node kills a process within a second; after a minute it never will."""


class Context:
    """The state shared by the handlers of one event."""

    def __init__(self, state: State, stamped: Stamped) -> None:
        self.state = state
        self.stamped = stamped
        self.commands: list[Command] = []
        self.endings: list[
            TrajectoryEnding
        ] = []  #: decided for this event, sent together after all else
        self.repack_due = False  #: whether replicas with stragglers are to be looked for
        self.failure: Failure | None = None  #: failure that ends the run
        self._touched: dict[str, None] = {}  #: replicas whose situation changed
        self._touched_all = False

    @property
    def next_command_id(self) -> int:
        return self.stamped.seq * COMMANDS_PER_EVENT_MAX + len(self.commands)

    def issue_command(
        self, command: AnyCommand, key: CommandKey | None = None, timeout_ms: int = 0
    ) -> None:
        """Issue a command; with a key it stays outstanding until `end_command(key)`.

        With a timeout, its expiry arrives as `timer-fired` "command:KEY"."""
        if key is not None:
            actor = self.state.members.actors.get(command.to)
            outstanding = OutstandingCommand(
                command_id=self.next_command_id,
                cause=self.stamped.seq,
                incarnation=actor.incarnation if actor else 0,
                command=command,
                since_ns=self.stamped.time_ns,
            )
            indexes.add_command(self.state, key, outstanding)
            if timeout_ms:
                self.set_timer(keys.deadline_timer(key), timeout_ms)
        self.commands.append(command)

    def restart_actor(
        self, name: str, reason: str, *, again: bool = False, cut_off: bool = False
    ) -> bool:
        """Order the node of an actor to kill and restart it; return False if already ordered.

        With `again`, a new order replaces an outstanding one."""
        actor = self.state.members.actors[name]
        if keys.restart_key(name) in self.state.orders.commands and not again:
            return False
        self.issue_command(
            RestartActor(
                to=actor.node, actor=name, boot_id=actor.boot_id, reason=reason, cut_off=cut_off
            ),
            key=keys.restart_key(name),
            timeout_ms=RESTART_TIMEOUT_MS,
        )
        return True

    def end_command(self, key: CommandKey) -> OutstandingCommand | None:
        """End an outstanding command after its ending event; return None if not outstanding."""
        self.clear_timer(keys.deadline_timer(key))
        return indexes.end_command(self.state, key)

    def mark_ready(self) -> bool:
        """Mark the sender as ready and back; return False, counted, if it was ready already."""
        actor = self.state.members.actors[self.stamped.peer]
        if actor.ready:
            self.ignore("repeat")
            return False
        actor.ready = True
        self.clear_timer(keys.rejoin_timer(actor.name))
        return True

    def ignore(self, reason: str) -> None:
        """Count an event that is ordinary or illegal here and changes nothing."""
        name = f"{type(self.stamped.event).__name__}: {reason}"
        self.state.run.ignored[name] = self.state.run.ignored.get(name, 0) + 1

    def set_timer(self, name: TimerName, delay_ms: int) -> None:
        indexes.set_timer(self.state, name, self.stamped.time_ns + delay_ms * 1_000_000)

    def clear_timer(self, name: TimerName) -> None:
        indexes.clear_timer(self.state, name)

    def touch_replica(self, replica: str) -> None:
        """Mark a replica as changed: the planner looks at it before the event is done."""
        if not self._touched_all:
            self._touched[replica] = None

    def touch_all(self) -> None:
        """Mark every replica as possibly changed."""
        self._touched_all = True

    @property
    def any_touched(self) -> bool:
        return self._touched_all or bool(self._touched)

    def take_touched(self) -> tuple[dict[str, None], bool]:
        """Return and clear the replicas touched by name, in order, and whether all were touched."""
        taken = self._touched, self._touched_all
        self._touched, self._touched_all = {}, False
        return taken
