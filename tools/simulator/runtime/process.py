"""A process slot of a simulated machine: boots, pauses, dies; each boot is a new process.

Reads   what a fault or its node does to it
Gives   the current boot (boot.py), and its model, an Idle: what its role needs of the world

A paused process does nothing and forgets nothing: delayed work happens when it resumes. Timers and
messages of an earlier boot, and frames of an earlier connection, are dropped, but its machine still
sends the frames that a link held back when the process ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from laminar.actors.host import ActorRole, Host
from laminar.events.base import COORDINATOR, Event
from laminar.names import exit_codes
from laminar.net.session import ClientLink, LinkState
from tools.simulator.context import Context, Process
from tools.simulator.runtime.boot import Boot
from tools.simulator.scheduler import Action


class SimProcess(Process):
    """A named process slot."""

    def __init__(
        self,
        world: Context,
        name: str,
        role: str,
        node: str,
        make_model: Callable[[SimProcess], Idle],
    ) -> None:
        self.world, self.name, self.role, self.node = world, name, role, node
        self._make_model = make_model
        self.boots: list[Boot] = []  #: all boots, kept to the end
        self.boot = 0
        self.boot_id = f"{name}/0"
        self.started_by = ""  #: boot id of the node that started it
        self.started_ns = 0  #: start of this boot
        self.alive = False
        self.paused = False
        self.slow = 1.0  #: factor on all its computing times
        self.welcomed = False  #: whether its actor has begun to start
        self.route = b""  #: routing id of the current connection; empty: none
        self._up = world.network.link(name, COORDINATOR)
        self._down = world.network.link(COORDINATOR, name)
        self._backlog: deque[tuple[Action, tuple[Any, ...]]] = deque()

    def __repr__(self) -> str:
        return self.boot_id

    @property
    def key(self) -> tuple[str, int]:
        """The name and number by which the coordinator knows the process."""
        return self.name, self.link.incarnation

    @property
    def link(self) -> ClientLink:
        """The process's link to the coordinator."""
        return self.current.link

    @property
    def pid(self) -> int:
        return self.current.pid

    @property
    def stopping(self) -> bool:
        return self.current.host.ending

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new process of this name, which looks for the coordinator."""
        self.boot += 1
        self.boot_id = f"{self.name}/{self.boot}"
        self.started_by = "" if self.role == "node" else self.world.processes[self.node].boot_id
        self.alive, self.paused, self.welcomed = True, False, False
        self.slow, self.started_ns = 1.0, self.world.scheduler.now
        self._backlog.clear()
        self.world.checks.process_started(self)
        self.current = Boot(self)
        self.boots.append(self.current)
        self.model = self._make_model(self)
        self.current.begin(self.model.make_actor(self.current.host))
        self.connect()

    def die(self, code: int) -> None:
        """End the process; its node notices."""
        if not self.alive:
            return
        self._end()
        self.world.process_ended(self, code, self.boot_id)

    def starter_gone(self) -> None:
        """Notice that the node is gone."""
        if self.alive:
            self.call_later(0, self.current.loop.enter, self.current.starter_gone)

    def replace(self) -> None:
        """Start a process of the same name before the death of this one is known."""
        ended = self.boot_id
        self._end()
        self.start()
        self.world.process_ended(self, exit_codes.KILLED, ended)

    def _end(self) -> None:
        self.alive = self.paused = False
        self.current.end()
        self.world.coordinator.hang_up(
            self.route, outlived=self.boot_id if self._up.clogged else ""
        )
        self.route = b""
        self._backlog.clear()

    def fail(self, reason: str) -> None:
        """Report that the process cannot continue, and end it."""
        self.current.loop.enter(self.current.host.fail_process, reason)

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

    def now_ns(self) -> int:
        return self.world.scheduler.now

    def call_later(self, delay_ns: int, action: Action, *args: Any) -> None:
        """Call `action` after a delay if this boot is still alive then."""
        self.world.scheduler.after(delay_ns, self.due, self.boot, action, args)

    def compute(self, duration_s: float, action: Action, *args: Any) -> None:
        """Call `action` when work that takes `duration_s` at full speed is done."""
        self.call_later(int(duration_s * self.slow * 1e9), action, *args)

    def due(self, boot: int, action: Action, args: tuple[Any, ...]) -> None:
        """Call an action of this boot, or keep it until a paused process resumes."""
        if boot != self.boot or not self.alive:
            return
        if self.paused:
            self._backlog.append((action, args))
        else:
            action(*args)

    # --- the link to the coordinator --------------------------------------------------------------

    def connect(self) -> None:
        """Connect if the coordinator listens; frames in flight on the old connection are lost."""
        self.route = self.world.coordinator.accept(self)
        self._arrive = partial(self._due_frame, self.route)
        self._leave_for = partial(self.world.coordinator.receive, self.route)
        self.current.flush_soon()

    def disconnect(self) -> None:
        self.world.coordinator.hang_up(self.route)
        self.route = b""

    def emit(self, event: Event) -> None:
        """Send an event of a model or a fault, even when paused, unless the link is closed."""
        if self.current.link.state not in (LinkState.REFUSED, LinkState.CLOSED):
            self.current.send(event)
            self.current.flush()

    def leave(self, frame: bytes) -> None:
        """Send a frame to the coordinator."""
        if self.route:
            self.world.network.send(self._up, self._leave_for, frame)

    def carry(self, frame: bytes) -> None:
        """Send a frame of the coordinator to this process."""
        self.world.network.send(self._down, self._arrive, frame)

    def _due_frame(self, route: bytes, frame: bytes) -> None:
        if route == self.route:
            self.due(self.boot, self.current.arrive, (frame,))


class Idle:
    """The world as one boot of a process sees it; a role overrides what it needs."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process
        self.world = process.world
        self.scenario = process.world.scenario
        self.chance = process.world.chance_of(process)

    @abstractmethod
    def make_actor(self, host: Host) -> ActorRole:
        """Return the real actor, over this model."""

    def pause(self) -> None:
        """Stop counting the passing time."""

    def resume(self) -> None:
        """Count the passing time again."""
