"""One process slot of a simulated machine: boots, pauses, dies; each boot is a new process.

Reads   what a fault or its node does to it
Gives   the boot that runs now (boot.py), and its model: what its role needs of the world, an Idle

A process that is paused does nothing and forgets nothing: what would have happened happens when it
wakes, however late. Timers and messages of an earlier boot, and frames of an earlier connection,
are gone; but what a line held back when its process ended, its machine still sends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from laminar.actors.host import Actor, Host
from laminar.events.base import COORDINATOR, Event
from laminar.names import exit_codes
from laminar.net.session import ClientLink, LinkState
from tools.simulator.context import Context, Process
from tools.simulator.runtime.boot import Boot
from tools.simulator.scheduler import Action


class SimProcess(Process):
    """A process slot by name."""

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
        self.boots: list[Boot] = []  #: all that there have been, kept to the end
        self.boot = 0
        self.boot_id = f"{name}/0"
        self.started_by = ""  #: boot id of its node then
        self.started_ns = 0  #: when this boot began
        self.alive = False
        self.paused = False
        self.slow = 1.0  #: factor on everything that it computes
        self.welcomed = False  #: its actor has begun to start
        self.route = b""  #: of the present connection; empty: there is none
        self._up = world.network.link(name, COORDINATOR)
        self._down = world.network.link(COORDINATOR, name)
        self._backlog: deque[tuple[Action, tuple[Any, ...]]] = deque()

    def __repr__(self) -> str:
        return self.boot_id

    @property
    def key(self) -> tuple[str, int]:
        """The name and number that the coordinator knows the process by."""
        return self.name, self.link.incarnation

    @property
    def link(self) -> ClientLink:
        """The process's line to the coordinator."""
        return self.current.link

    @property
    def pid(self) -> int:
        return self.current.pid

    @property
    def stopping(self) -> bool:
        return self.current.host.ending

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process of this name begins to look for the coordinator."""
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
        """The process is gone; its node sees that."""
        if not self.alive:
            return
        self._end()
        self.world.process_ended(self, code, self.boot_id)

    def starter_gone(self) -> None:
        """The process notices that its node is gone."""
        if self.alive:
            self.call_later(0, self.current.loop.enter, self.current.starter_gone)

    def replace(self) -> None:
        """A new process has its name before anybody has heard that this one died."""
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
        """The process cannot go on: it says so, and ends."""
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
        """Call later, if this boot still lives then."""
        self.world.scheduler.after(delay_ns, self.due, self.boot, action, args)

    def compute(self, duration_s: float, action: Action, *args: Any) -> None:
        """Call when work is done that takes so long at full speed."""
        self.call_later(int(duration_s * self.slow * 1e9), action, *args)

    def due(self, boot: int, action: Action, args: tuple[Any, ...]) -> None:
        """Call what is meant for this boot, or, when it stands still, keep it until it goes on."""
        if boot != self.boot or not self.alive:
            return
        if self.paused:
            self._backlog.append((action, args))
        else:
            action(*args)

    # --- the line to the coordinator --------------------------------------------------------------

    def connect(self) -> None:
        """A new connection, if the other side listens: what was in flight on the old one is
        lost."""
        self.route = self.world.coordinator.accept(self)
        self._arrive = partial(self._due_frame, self.route)
        self._leave_for = partial(self.world.coordinator.receive, self.route)
        self.current.flush_soon()

    def disconnect(self) -> None:
        self.world.coordinator.hang_up(self.route)
        self.route = b""

    def emit(self, event: Event) -> None:
        """Send an event of a model or a fault, if anybody listens, though it may stand still."""
        if self.current.link.state not in (LinkState.REFUSED, LinkState.CLOSED):
            self.current.send(event)
            self.current.flush()

    def leave(self, frame: bytes) -> None:
        """A frame sets out to the coordinator."""
        if self.route:
            self.world.network.send(self._up, self._leave_for, frame)

    def carry(self, frame: bytes) -> None:
        """A frame of the coordinator sets out to this process."""
        self.world.network.send(self._down, self._arrive, frame)

    def _due_frame(self, route: bytes, frame: bytes) -> None:
        if route == self.route:
            self.due(self.boot, self.current.arrive, (frame,))


class Idle:
    """What one boot of a process has of the world; a role overrides what it has something to do
    for."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process
        self.world = process.world
        self.scenario = process.world.scenario
        self.chance = process.world.chance_of(process)

    @abstractmethod
    def make_actor(self, host: Host) -> Actor:
        """The real one, over this."""

    def pause(self) -> None:
        """Time that passes from now on must not count."""

    def resume(self) -> None:
        """Time counts again."""
