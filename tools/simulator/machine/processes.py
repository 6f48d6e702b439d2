"""The operating system's processes of a machine, as its node sees them.

Reads   the boots of the simulator's processes
Gives   MachineProcesses, the Processes of actors/node.py in virtual time

A process that a fault put in place of another becomes the node's child at its next start. A process
that must stay lost ends at every start, with the exit code of a user's mistake.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from laminar.actors.host import ActorRole, Host
from laminar.actors.node import Node
from laminar.names import exit_codes
from tools.simulator.context import Process
from tools.simulator.runtime.process import Idle, SimProcess

LAUNCH_MAX_S = 0.3


class Child:
    """A boot of a process: the ChildProcess of actors/node.py."""

    def __init__(self, process: SimProcess, node: Process) -> None:
        self.pid, self.boot_id = process.current.pid, process.boot_id
        self.returncode: int | None = None
        self._boot, self._process, self._node = process.current, process, node
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
            self._node.world.checks.node_reports.killed(self._node, self.boot_id)
            self._process.die(exit_codes.KILLED)


class MachineProcesses(Idle):
    """The processes of one machine, except its node."""

    def __init__(self, process: SimProcess, others: Sequence[SimProcess]) -> None:
        super().__init__(process)
        self._others = {other.name: other for other in others}
        self._children: dict[str, Child] = {}  #: last child of each actor

    def make_actor(self, host: Host) -> ActorRole:
        roles = Counter(other.role for other in self._others.values())
        return Node(host, list(roles.items()), self)

    def prepare_launches(self) -> None: ...

    async def launch_actor(self, name: str, role: str) -> Child:
        faults, process = self.world.faults, self._others[name]
        await asyncio.sleep(0.0 if faults.storm else self.chance.uniform(0, LAUNCH_MAX_S))
        if not process.alive:
            process.start()
        child = self._children[name] = Child(process, self.process)
        if faults.dead_for_good(process):
            process.die(exit_codes.USER_ERROR)
        return child

    async def close(self) -> None:
        alive = [child.boot_id for child in self._children.values() if child.alive]
        self.world.checks.node_reports.left(self.process, alive)
        for process in self._others.values():
            process.starter_gone()

    def ended(self, boot_id: str, name: str, code: int) -> None:
        """Record the end of a process of this machine."""
        child = self._children.get(name)
        if child is not None and child.boot_id == boot_id:
            self.world.checks.node_reports.ended(self.process, boot_id, code)
            self.process.current.loop.enter(child.ended, code)
