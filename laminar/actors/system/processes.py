"""The processes of one machine, for its node: forked from warm processes, closed at the end.

Reads   the ends of children, by their pidfd; the GPUs of this machine
Writes  nothing; removes the shared memory of killed relays when the run ends
Starts  a warm process of each kind (warm_process.py), which forks the actors
Gives   MachineProcesses, the Processes of actors/node.py; assign_gpus

Actors are children of the node, whichever process forked them. They share its lock of the run
directory from the start, and end when the node's end of their standard input is closed. Emulated
replicas share processes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from laminar.actors.host import Host
from laminar.actors.system.roles import collect_needs, get_process_kind
from laminar.actors.system.warm import WarmProcess
from laminar.actors.system.warm_process import Launch
from laminar.config import Config
from laminar.engines.environment import gpus_per_replica, visible_gpus
from laminar.names import ids
from laminar.run.child_process import ChildProcess, Spawned
from laminar.run.lock import RunLock
from laminar.run.process_guard import adopt_orphans, reap_orphan
from laminar.weights.arena.arena import sweep_arenas

REAP_S = 1.0  #: interval of the search for children of killed actors, which are then the node's


def assign_gpus(
    role: str, name: str, gpus: list[str], per_replica: int = 1, ranks: int = 1
) -> list[str]:
    """Return an actor's GPUs: the first `ranks` for the trainer, the others for replicas.

    Replicas share the trainer's GPUs if too few are left. A replica always gets `per_replica`
    adjacent ones, never a shorter rest.
    """
    if role == "trainer":
        return gpus[:ranks]
    others = gpus[ranks:] if len(gpus) - ranks >= per_replica else gpus
    if not others or role != "rollout":
        return []
    index = int(name.rpartition("-")[2].rpartition(".")[2])
    first = index % max(len(others) // per_replica, 1) * per_replica
    return others[first : first + per_replica]


def group_by_process(
    roles: Iterable[tuple[str, int]], config: Config, node: str
) -> dict[str, tuple[str, ...]]:
    """Return by actor the actors that share its process; only emulated replicas share one."""
    found: dict[str, tuple[str, ...]] = {}
    for role, count in roles:
        share = config.is_emulated and role == "rollout"
        size = config.emulation.replicas_per_process if share else 1
        names = [ids.actor_name(role, node, index) for index in range(count)]
        for start in range(0, count, size):
            group = tuple(names[start : start + size])
            found |= dict.fromkeys(group, group)
    return found


class Member:
    """The process of an actor, as ChildProcess; it ends together with all that share it."""

    def __init__(self, process: ChildProcess, boot_id: str) -> None:
        self.pid, self.boot_id = process.pid, boot_id
        self.wait, self.dump_stacks = process.wait, process.dump_stacks
        self.terminate, self.kill = process.terminate, process.kill
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode


class MachineProcesses:
    """Real processes; close ends the warm ones, and all that still have the lifeline."""

    def __init__(
        self,
        host: Host,
        lock: RunLock,
        roles: Sequence[tuple[str, int]],
        seeds: Mapping[str, Spawned] | None = None,
    ) -> None:
        """Create the pipes and warm processes.

        `roles`: with the number of actors. `seeds`: prestarted warm processes, by kind.
        """
        self._host, self._lock, self._gpus = host, lock, visible_gpus()
        here = "trainer" in dict(roles) or ip_address(host.address).is_loopback
        self._ranks = host.config.trainer.ranks if here else 0  #: with GPUs of this machine
        self._together = group_by_process(roles, host.config, host.node)
        self._newest: dict[tuple[str, ...], tuple[ChildProcess, str]] = {}  #: and its boot id
        self._starts = Counter[tuple[str, ...]]()
        self._lifeline = os.pipe()  #: the read end is the standard input of the actors
        ready_s, seeds = host.config.coordinator.start_timeout_s, seeds or {}
        self._warm = {
            name: WarmProcess(name, need, host.log, ready_s=ready_s, seed=seeds.get(name))
            for name, need in collect_needs(dict(roles), host.config, gpus=bool(self._gpus)).items()
        }

    def prepare_launches(self) -> None:
        """Start the warm processes, which import while other processes work."""
        adopt_orphans()
        self._host.spawn(self._reap_orphans())
        for warm in self._warm.values():
            warm.ensure_started()

    async def launch_actor(self, name: str, role: str) -> Member:
        """Return an actor's process, which already lives if it is shared and was launched."""
        names = self._together[name]
        process, boot = self._newest.get(names, (None, ""))
        if process is None or process.returncode is not None:
            boot = secrets.token_hex(8)
            process = await self._fork_actors(names, role, boot)
            self._newest[names] = process, boot
        return Member(process, f"{name}-{boot}")

    async def _fork_actors(self, names: tuple[str, ...], role: str, boot: str) -> ChildProcess:
        host, name = self._host, names[0]
        self._starts[names] += 1
        environment: dict[str, str | None] = {
            "LAMINAR_BOOT": boot,
            "LAMINAR_NODE_BOOT": host.boot_id,
            "LAMINAR_START": str(self._starts[names]),
            "LAMINAR_CLOCK_OFFSET_NS": str(host.clock_offset_ns),
        }
        gpus = assign_gpus(role, name, self._gpus, gpus_per_replica(host.config), self._ranks)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        launch = Launch(
            run_dir=str(host.run_dir),
            name=name,
            role=role,
            node=host.node,
            address=host.address,
            environment=environment,
            beside=names[1:],
        )
        warm = self._warm[get_process_kind(role, host.config)]
        return await warm.fork_actor(launch, self._lifeline[0], self._lock.fd)

    async def close(self) -> None:
        for warm in self._warm.values():
            await warm.close()
        for fd in self._lifeline:
            os.close(fd)
        sweep_arenas()

    async def _reap_orphans(self) -> None:
        seen = 0
        while True:
            known = {process.pid for process, _ in self._newest.values()}
            seen = reap_orphan(known | {warm.pid for warm in self._warm.values()}, seen)
            await asyncio.sleep(REAP_S)
