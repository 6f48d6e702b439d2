"""One actor process in virtual time: boots, pauses, dies, and speaks through the real session.

Reads   frames of the coordinator, replies of other processes
Emits   frames, through a real ClientLink; commands to its model, once each (CommandFilter)

What actors/host.py is for a real process. A process that is paused does nothing and forgets
nothing: what would have happened happens when it wakes, however late. Timers and messages of an
earlier boot, and frames of an earlier connection, are gone.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from laminar.actors.protocol import CommandFilter
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, WireError
from laminar.events.codec import decode_order, encode
from laminar.net.session import MS, NEVER_NS, ClientLink, LinkState
from laminar.sim.rpc import Client, Server
from laminar.sim.scheduler import Action

if TYPE_CHECKING:
    from laminar.sim.world import World

FLUSH_NS = 2_000 * MS
"""How long a process that ends waits for its last acknowledgements."""
EXIT_FAILED, EXIT_ABSENT, EXIT_KILLED = 1, 3, -9


class Model(Protocol):
    """What a role does: the part of a real actor that is left when I/O is taken away."""

    listens: bool  #: it answers requests

    def start(self) -> None:
        """The coordinator has welcomed the process: get ready and report it."""

    def handle(self, order: cmd.Order, command: Command) -> None: ...

    def answer(self, client: str, request: Any) -> Any:
        """Reply to a request of another process (servers only)."""

    def pause(self) -> None:
        """The process stands still from now on."""

    def resume(self) -> None: ...

    def stop(self, gone: Action) -> None:
        """The process ends in good order; call `gone` when it may."""


class SimProcess:
    """A process slot by name; each boot is a new process."""

    def __init__(self, world: World, name: str, role: str, node: str) -> None:
        self.world, self.name, self.role, self.node = world, name, role, node
        self.boot = 0
        self.boot_id = f"{name}/0"
        self.alive = False
        self.paused = False
        self.slow = 1.0  #: factor on everything that it computes
        self.welcomed = False
        self.stopping = False
        self.route = b""  #: of the present connection; empty: there is none
        self.server = Server(self)
        self._up = world.network.link(name, COORDINATOR)
        self._down = world.network.link(COORDINATOR, name)
        self._backlog: deque[tuple[Action, tuple[Any, ...]]] = deque()
        self._wake_ns = NEVER_NS
        self._flush_due = False

    def __repr__(self) -> str:
        return self.boot_id

    @property
    def key(self) -> tuple[str, int]:
        """Who it is for the coordinator."""
        return self.name, self.link.incarnation

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process of this name begins to look for the coordinator."""
        self.boot += 1
        self.boot_id = f"{self.name}/{self.boot}"
        self.alive, self.paused, self.welcomed, self.stopping = True, False, False, False
        self.slow = 1.0
        self.link = ClientLink(
            self.name,
            self.role,
            self.boot_id,
            heartbeat_ns=self.world.scenario.heartbeat_ns,
            now_ns=self.world.scheduler.now,
            info={"node": self.node, "pid": str(1000 + self.boot)},
        )
        self.filter = CommandFilter()
        self.client = Client(self)
        self.model: Model = self.world.make_model(self)
        self.server.restarted()
        self._wake_ns = NEVER_NS
        self._flush_due = False
        self._backlog.clear()
        self.world.checks.process_started(self)
        self.connect()

    def die(self, code: int) -> None:
        """The process is gone; its node sees that."""
        if not self.alive:
            return
        self.alive = self.paused = False
        self.disconnect()
        self._backlog.clear()
        self.world.process_ended(self, code, self.boot_id)

    def replace(self) -> None:
        """A new process has its name before anybody has heard that this one died."""
        ended = self.boot_id
        self.alive = self.paused = False
        self.disconnect()
        self.start()
        self.world.process_ended(self, EXIT_KILLED, ended)

    def fail(self, reason: str, code: int = EXIT_FAILED) -> None:
        """It cannot go on: it says so, and ends."""
        if code != EXIT_ABSENT and self.link.incarnation:
            self.emit(ev.ActorFailed(reason=reason, user_error=False))
        self._end(code)

    def pause(self) -> None:
        if self.alive and not self.paused:
            self.paused = True
            self.model.pause()

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self.model.resume()
        while self._backlog and self.alive and not self.paused:
            action, args = self._backlog.popleft()
            action(*args)

    # --- time ---------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Action, *args: Any) -> None:
        """Call later, if this boot still lives then."""
        self.world.scheduler.after(delay_ns, self._due, self.boot, action, args)

    def compute(self, duration_s: float, action: Action, *args: Any) -> None:
        """Call when work is done that takes so long at full speed."""
        self.after(int(duration_s * self.slow * 1e9), action, *args)

    def _due(self, boot: int, action: Action, args: tuple[Any, ...]) -> None:
        if boot != self.boot or not self.alive:
            return
        if self.paused:
            self._backlog.append((action, args))
        else:
            action(*args)

    # --- the line to the coordinator --------------------------------------------------------------

    def connect(self) -> None:
        """A new connection, if somebody listens: what was in flight on the old one is lost."""
        self.route = self.world.coordinator.accept(self)
        self._arrive = partial(self._due_frame, self.route)
        self._leave_for = partial(self.world.coordinator.receive, self.route)
        self._flush_soon()

    def disconnect(self) -> None:
        self.world.coordinator.hang_up(self.route)
        self.route = b""

    def emit(self, event: Event) -> None:
        """Send an event; the session keeps it until it is acknowledged."""
        if self.link.state in (LinkState.REFUSED, LinkState.CLOSED):
            return  # the process is ending, and nobody listens to it
        body = encode(event)
        self.link.send(body)
        self.world.checks.sent(self, body)
        self._flush()

    def gauge(self, event: Event) -> None:
        self.link.gauge(encode(event))
        self._flush()

    def carry(self, frame: bytes) -> None:
        """A frame of the coordinator sets out to this process."""
        self.world.network.send(self._down, self._arrive, frame)

    def _flush_soon(self) -> None:
        """Once everything that arrives at this instant has arrived."""
        if not self._flush_due:
            self._flush_due = True
            self.after(0, self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        self._flush()

    def _flush(self) -> None:
        """Send what is due, and wake up when more is."""
        for frame in self.link.poll(self.world.scheduler.now):
            if self.route:
                self.world.network.send(self._up, self._leave_for, frame)
        self._sleep(self.link.next_due_ns())

    def _sleep(self, due_ns: int) -> None:
        """Be awake when something is due; who wakes too early sleeps on."""
        now = self.world.scheduler.now
        if due_ns < self._wake_ns or self._wake_ns <= now:
            self._wake_ns = max(due_ns, now + 1)
            if due_ns != NEVER_NS:
                self.after(self._wake_ns - now, self._wake, self._wake_ns)

    def _wake(self, when_ns: int) -> None:
        if when_ns == self._wake_ns and not self._flush_due:
            self._wake_ns = NEVER_NS
            due_ns = self.link.next_due_ns()
            if due_ns <= self.world.scheduler.now:
                self._flush()
            else:
                self._sleep(due_ns)

    def _due_frame(self, route: bytes, frame: bytes) -> None:
        if not self.alive or route != self.route:
            return
        if self.paused:
            self._backlog.append((self._receive, (frame,)))
        else:
            self._receive(frame)

    def _receive(self, frame: bytes) -> None:
        link = self.link
        try:
            bodies = link.receive(frame, self.world.scheduler.now)
        except WireError:
            self.world.marks.hit("session:actor-refuses-garbage")
            return
        self.world.checks.acknowledged(self)
        for body in bodies:
            self._obey(body)
        if link.state is LinkState.REFUSED:
            self.world.marks.hit("session:refused")
            return self._end(EXIT_ABSENT)
        if not self.welcomed and link.incarnation:
            self.welcomed = True
            self.model.start()
        due_ns = link.next_due_ns()
        if due_ns <= self.world.scheduler.now:
            self._flush_soon()
        else:
            self._sleep(due_ns)

    def _obey(self, body: bytes) -> None:
        order, command = decode_order(body)
        self.world.checks.ordered(self, order, command)
        if not self.filter.take(order.command_id):
            self.world.marks.hit("session:command-repeated")
            return
        self.world.checks.obeyed(self, order)
        if self.world.faults.ignores(self, command):
            return
        if isinstance(command, cmd.StopActor):
            self.stop()
        else:
            self.model.handle(order, command)

    # --- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Say goodbye in good order."""
        if not self.stopping:
            self.model.stop(self._goodbye)

    def _goodbye(self) -> None:
        if not self.stopping:
            self.emit(ev.ActorLeft())
            self._end(0)

    def _end(self, code: int) -> None:
        """Wait a little for acknowledgements, say Bye, exit."""
        if not self.stopping:
            self.stopping = True
            self._leave(self.world.scheduler.now + FLUSH_NS, code)

    def _leave(self, deadline_ns: int, code: int) -> None:
        waiting = self.link.outbox and self.link.state is LinkState.UP
        if waiting and self.world.scheduler.now < deadline_ns:
            self.after(50 * MS, self._leave, deadline_ns, code)
            return
        self.link.close()
        self._flush()
        self.die(code)
