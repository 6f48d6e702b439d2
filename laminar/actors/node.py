"""The node actor: starts, watches and restarts the actor processes of one machine.

Reads   RestartActor commands; exit codes of its children
Writes  nothing; removes the shared memory of killed relays, when the run ends
Starts  a warm process of each kind (warm_process.py), which forks the actors
Emits   ProcessExited, once per actor that ended

A replica or relay that ends without the coordinator's order, by a signal or by a fault, is started
again, up to recovery.max_restarts times; store and trainer are not, since their state is gone with
them. A child that ends with the code of a user's mistake is never started again: the same mistake
would meet it. Actors are children of the node, whoever forked them. They have its share of the run
directory's lock from their birth, and end when the other end of their standard input, which the
node has, is closed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from laminar import exit_codes, ids
from laminar.actors.child_process import ChildProcess, adopt_orphans, reap_orphan
from laminar.actors.host import Host
from laminar.actors.roles import kind, needs
from laminar.actors.warm import Seed, WarmProcess
from laminar.actors.warm_process import Launch
from laminar.engines.environment import gpus_per_replica, visible_gpus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.weights.arena import sweep_arenas

GRACE_S = 10.0
"""How long children may take to flush and leave once the run stops."""
DUMP_S = 0.5
"""How long a stalled child has to write its stacks before it is killed."""
RESTARTED_ROLES = ("rollout", "relay")
REAP_S = 1.0
"""Between two looks for children of killed actors, which are the node's then."""


@dataclass
class Child:
    """One actor slot of this machine."""

    name: str
    role: str
    boot: str = ""
    process: ChildProcess | None = None
    restarts: int = 0


def gpus_of(role: str, name: str, gpus: list[str], per_replica: int = 1) -> list[str]:
    """The trainer has the first GPU, replicas take turns on the others (or share the only one).

    A replica has `per_replica` neighbours, and never fewer because the last ones are left over.
    """
    if role == "trainer":
        return gpus[:1]
    others = gpus[1:] if len(gpus) > per_replica else gpus
    if not others or role != "rollout":
        return []
    index = int(name.rpartition("-")[2].rpartition(".")[2])
    first = index % max(len(others) // per_replica, 1) * per_replica
    return others[first : first + per_replica]


class Node:
    """The processes of one machine."""

    def __init__(
        self, host: Host, roles: list[tuple[str, int]], seeds: Mapping[str, Seed] | None = None
    ) -> None:
        """`seeds`: warm processes that were started before, by kind."""
        self.host = host
        self.children: dict[str, Child] = {
            (name := ids.actor_name(role, host.node, index)): Child(name, role)
            for role, count in roles
            for index in range(count)
        }
        self._gpus = visible_gpus()
        self._stopping = False
        self._launching = asyncio.Lock()  #: one process at a time
        self._lifeline = os.pipe()  #: its first end is the standard input of the actors
        self._warm = self._make_warm(seeds or {})

    async def start(self) -> None:
        adopt_orphans()
        self.host.spawn(self._reap())
        for warm in self._warm.values():
            warm.begin()
        for child in self.children.values():
            await self._launch(child)

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        for order, command in orders:
            if isinstance(command, cmd.RestartActor):
                self.host.log.warning(
                    "restart", actor=command.actor, reason=command.reason, event_seq=order.cause
                )
                self.host.spawn(self._kill(self.children[command.actor]))

    async def stop(self) -> None:
        """Children leave when the coordinator says so, or else now; wait, then insist."""
        self._stopping = True
        async with self._launching:  # what is being started is known to us then
            pass
        living = [c.process for c in self.children.values() if c.process is not None]
        if not self.host.ordered_to_stop:
            for process in living:
                if process.returncode is None:
                    process.terminate()
        waits = [asyncio.ensure_future(p.wait()) for p in living if p.returncode is None]
        if waits:
            await asyncio.wait(waits, timeout=GRACE_S)
        for process in living:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for warm in self._warm.values():
            await warm.close()
        for fd in self._lifeline:
            os.close(fd)
        sweep_arenas()

    async def _launch(self, child: Child) -> None:
        async with self._launching:
            if self._stopping:
                return
            process = child.process = await self._start_process(child)
        if self._stopping:
            process.kill()  # the coordinator does not know it, and cannot tell it to leave
        self.host.log.info("launched", actor=child.name, pid=process.pid)
        self.host.spawn(self._watch(child, process))

    async def _start_process(self, child: Child) -> ChildProcess:
        child.boot = secrets.token_hex(8)
        environment: dict[str, str | None] = {"LAMINAR_BOOT": child.boot}
        gpus = gpus_of(child.role, child.name, self._gpus, gpus_per_replica(self.host.config))
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        launch = Launch(
            run_dir=str(self.host.run_dir),
            name=child.name,
            role=child.role,
            node=self.host.node,
            address=self.host.address,
            environment=environment,
        )
        warm = self._warm[kind(child.role, self.host.config)]
        return await warm.fork(launch, self._lifeline[0], self.host.lock.fd)

    def _make_warm(self, seeds: Mapping[str, Seed]) -> dict[str, WarmProcess]:
        """One of each kind that this machine's actors are of."""
        config, roles = self.host.config, [child.role for child in self.children.values()]
        ready_s = config.coordinator.start_timeout_s
        return {
            name: WarmProcess(name, need, self.host.log, ready_s=ready_s, seed=seeds.get(name))
            for name, need in needs(roles, config, gpus=bool(self._gpus)).items()
        }

    async def _reap(self) -> None:
        seen = 0
        while True:
            known = {child.process.pid for child in self.children.values() if child.process}
            seen = reap_orphan(known | {warm.pid for warm in self._warm.values()}, seen)
            await asyncio.sleep(REAP_S)

    async def _watch(self, child: Child, process: ChildProcess) -> None:
        code = await process.wait()
        may = child.role in RESTARTED_ROLES and child.restarts < self._restarts_max
        restarting = (
            may and code not in (exit_codes.COMPLETE, exit_codes.USER_ERROR) and not self._stopping
        )
        exited = ev.ProcessExited(
            actor=child.name,
            boot_id=f"{child.name}-{child.boot}",
            code=code,
            restarting=restarting,
        )
        self.host.emit(exited, actor=child.name, code=code, restarting=restarting)
        if restarting:
            child.restarts += 1
            await self._launch(child)

    @property
    def _restarts_max(self) -> int:
        return self.host.config.recovery.max_restarts

    async def _kill(self, child: Child) -> None:
        """Have the stacks written, then end it; the watcher does the rest."""
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(DUMP_S)
        if process.returncode is None:
            process.kill()
