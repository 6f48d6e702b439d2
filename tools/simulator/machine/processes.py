"""The operating system's processes of a machine, as its node sees them.

Reads   the boots of the simulator's processes
Gives   MachineProcesses, the Processes of actors/node.py in virtual time

A process that a fault has put in the place of another is the node's child from its next start on.
One that is to stay lost ends whenever it is started, with the code of a mistake of the user's.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from laminar.actors.host import Actor, Host
from laminar.actors.node import Node
from laminar.names import exit_codes
from tools.simulator.runtime.idle import Idle
from tools.simulator.runtime.process import SimProcess

LAUNCH_MAX_S = 0.3


class Child:
    """One boot of a process: the ChildProcess of actors/node.py."""

    def __init__(self, process: SimProcess) -> None:
        self.pid, self.boot_id = process.current.pid, process.boot_id
        self.returncode: int | None = None
        self._boot = process.current
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def dump_stacks(self) -> None: ...

    def terminate(self) -> None:
        boot = self._boot
        boot.deliver(boot.loop.enter, boot.terminate, "SIGTERM")

    @property
    def alive(self) -> bool:
        return not self._boot.loop.closed

    def kill(self) -> None:
        if self.alive:
            process, world = self._boot.process, self._boot.process.world
            world.checks.node_reports.killed(world.processes[process.node], self.boot_id)
            process.die(exit_codes.KILLED)


class MachineProcesses(Idle):
    """The processes of one machine, but its node."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__(process)
        self._children: dict[str, Child] = {}  #: the last one of each actor

    def make_actor(self, host: Host) -> Actor:
        roles = Counter(child.role for child in self.world.children_of(host.node))
        return Node(host, list(roles.items()), self)

    def begin(self) -> None: ...

    async def launch(self, name: str, role: str) -> Child:
        faults, process = self.world.faults, self.world.processes[name]
        await asyncio.sleep(0.0 if faults.storm else self.chance.uniform(0, LAUNCH_MAX_S))
        if not process.alive:
            process.start()
        child = self._children[name] = Child(process)
        if faults.dead_for_good(process):
            process.die(exit_codes.USER_ERROR)
        return child

    async def close(self) -> None:
        alive = [child.boot_id for child in self._children.values() if child.alive]
        self.world.checks.node_reports.left(self.process, alive)
        for process in self.world.children_of(self.process.name):
            process.starter_gone()

    def ended(self, boot_id: str, name: str, code: int) -> None:
        """A process of the machine has ended."""
        child = self._children.get(name)
        if child is not None and child.boot_id == boot_id:
            self.world.checks.node_reports.ended(self.process, boot_id, code)
            self.process.current.loop.enter(child.ended, code)
