"""The context of one event: the state, the cause, and the commands decided so far.

Reads   state, the stamped event
Writes  state.commands, state.timers, state.ignored
Emits   whatever the handlers put in with `command`

Every function that decides takes a Context, so that every command carries its cause.
"""

from __future__ import annotations

from laminar.core.state import indexes, keys
from laminar.core.state.failures import Failure
from laminar.core.state.keys import CommandKey, TimerName
from laminar.core.state.state import OutstandingCommand, State
from laminar.events.base import Command, Stamped
from laminar.events.commands import AnyCommand, RestartActor, TrajectoryEnding

COMMANDS_PER_EVENT_MAX = 1 << 20
"""command_id = event seq * 2**20 + index: both parts can be read off the number."""
RESTART_TIMEOUT_MS = 60_000
"""A node needs a second to kill a process; after a minute it will not do it any more."""


class Context:
    """What the handlers of one event share."""

    def __init__(self, state: State, stamped: Stamped) -> None:
        self.state = state
        self.stamped = stamped
        self.commands: list[Command] = []
        self.endings: list[
            TrajectoryEnding
        ] = []  #: decided for this event, sent together after all else
        self.repack_due = False  #: it is time to look for replicas in their tail
        self.failure: tuple[Failure, int] | None = None  #: that ends the run, with its exit code
        self._touched: dict[str, None] = {}  #: replicas whose situation changed
        self._touched_all = False

    @property
    def next_command_id(self) -> int:
        return self.stamped.seq * COMMANDS_PER_EVENT_MAX + len(self.commands)

    def issue_command(
        self, command: AnyCommand, key: CommandKey | None = None, timeout_ms: int = 0
    ) -> None:
        """Decide a command; with a key it stays outstanding until `done(key)`.

        With a timeout, expiry arrives as `timer-fired` "command:KEY".
        """
        if key is not None:
            actor = self.state.actors.get(command.to)
            outstanding = OutstandingCommand(
                command_id=self.next_command_id,
                cause=self.stamped.seq,
                incarnation=actor.incarnation if actor else 0,
                command=command,
            )
            indexes.add_command(self.state, key, outstanding)
            if timeout_ms:
                self.set_timer(keys.deadline_timer(key), timeout_ms)
        self.commands.append(command)

    def restart_actor(
        self, name: str, reason: str, *, again: bool = False, cut_off: bool = False
    ) -> bool:
        """Have a node kill and start one of its actors; False if that is ordered already, unless it
        is to be ordered `again`, in place of the first time."""
        actor = self.state.actors[name]
        if keys.restart_key(name) in self.state.commands and not again:
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
        """The ending event of an outstanding command has come (None: it was not outstanding)."""
        self.clear_timer(keys.deadline_timer(key))
        return indexes.end_command(self.state, key)

    def ignore(self, reason: str) -> None:
        """An event that is ordinary or illegal here: it changes nothing and is counted."""
        name = f"{type(self.stamped.event).__name__}: {reason}"
        self.state.ignored[name] = self.state.ignored.get(name, 0) + 1

    def set_timer(self, name: TimerName, delay_ms: int) -> None:
        indexes.set_timer(self.state, name, self.stamped.time_ns + delay_ms * 1_000_000)

    def clear_timer(self, name: TimerName) -> None:
        indexes.clear_timer(self.state, name)

    def touch_replica(self, replica: str) -> None:
        """This replica's situation changed: the planner looks at it before the event is done."""
        if not self._touched_all:
            self._touched[replica] = None

    def touch_all(self) -> None:
        """The situation of every replica may have changed."""
        self._touched_all = True

    @property
    def any_touched(self) -> bool:
        return self._touched_all or bool(self._touched)

    def take_touched(self) -> tuple[dict[str, None], bool]:
        """The replicas that were touched by name, in order, and whether all others were touched,
        too."""
        taken = self._touched, self._touched_all
        self._touched, self._touched_all = {}, False
        return taken
