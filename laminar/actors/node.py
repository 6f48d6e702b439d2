"""The node actor: starts, watches and restarts the actor processes of one machine.

Reads   RestartActor commands; exit codes of its children
Emits   ProcessExited, once per actor that ended

A replica or relay that ends without the coordinator's order, by a signal or by a fault, is started
again, as often and after such pauses as restart_limit.py says. So is a store that was killed: all
that it has acknowledged is on disk; and a trainer that writes checkpoints. A store that says why it
cannot go on is not. A child that ends with the code of a user's mistake is never started again: the
same mistake would meet it. One that the coordinator has given up for its silence, or does not take
while the run ends, say, is started again however often. So is one that was silent with its whole
machine: nothing is wrong with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Protocol

from laminar.actors.host import Host
from laminar.actors.restart_limit import TAKEN_S, RestartLimit
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names import exit_codes, ids

GRACE_S = 10.0
"""How long children may take to flush and leave once the run stops."""
DUMP_S = 0.5
"""How long a stalled child has to write its stacks before it is killed."""


class ChildProcess(Protocol):
    """A child. A signal to one that has ended does nothing."""

    @property
    def pid(self) -> int: ...

    @property
    def boot_id(self) -> str:
        """NAME-BOOT, of no other process of the run."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it lives."""
        ...

    async def wait(self) -> int:
        """The child's returncode, once it has ended."""

    def dump_stacks(self) -> None:
        """Have it write what its threads are doing."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Processes(Protocol):
    """The operating system's processes of this machine."""

    def prepare_launches(self) -> None:
        """Get ready to launch."""

    async def launch_actor(self, name: str, role: str) -> ChildProcess:
        """A new process of this actor; RuntimeError when there can be none."""

    async def close(self) -> None:
        """All have ended: remove what is left of them, and launch no more."""


@dataclass
class Child:
    """One actor slot of this machine."""

    name: str
    role: str
    limit: RestartLimit
    process: ChildProcess | None = None
    cut_off: str = ""  #: boot id of one that is ended since its machine was silent


class Node:
    """The processes of one machine."""

    def __init__(self, host: Host, roles: list[tuple[str, int]], processes: Processes) -> None:
        self.host = host
        self.children: dict[str, Child] = {
            (name := ids.actor_name(role, host.node, index)): Child(
                name, role, RestartLimit(host.config)
            )
            for role, count in roles
            for index in range(count)
        }
        self._processes = processes
        self._restarted = ["rollout", "relay"]
        if host.config.trainer.save_freq:
            self._restarted.append("trainer")
        self._stopping = False
        self._launching = asyncio.Lock()  #: one process at a time

    async def start(self) -> None:
        self._processes.prepare_launches()
        for child in self.children.values():
            await self._launch_child(child)

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        for order, command in orders:
            if isinstance(command, cmd.RestartActor):
                self.host.log.warning(
                    "restart", actor=command.actor, reason=command.reason, event_seq=order.cause
                )
                self.host.spawn(self._kill_child(self.children[command.actor], command))

    async def stop(self) -> None:
        """Children leave when the coordinator says so, or else now; wait, then insist."""
        self._stopping = True
        async with self._launching:  # what is being started is known to us then
            pass
        launched = [c.process for c in self.children.values() if c.process is not None]
        if not self.host.ordered_to_stop:
            for process in launched:
                process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                for process in launched:
                    await process.wait()
        for process in launched:
            process.kill()
            await process.wait()
        await self._processes.close()

    async def _launch_child(self, child: Child) -> None:
        async with self._launching:
            if self._stopping:
                return
            process = child.process = await self._processes.launch_actor(child.name, child.role)
        if self._stopping:
            process.kill()  # the coordinator does not know it, and cannot tell it to leave
        await self.host.hit_failpoint("node-launched")
        self.host.log.info("launched", actor=child.name, pid=process.pid)
        self.host.spawn(self._watch_child(child, process))

    async def _watch_child(self, child: Child, process: ChildProcess) -> None:
        began_ns = self.host.now_ns()
        code = await process.wait()
        if self._stopping and not self.host.ordered_to_stop:
            return  # it leaves with its machine, which may come back
        await self.host.hit_failpoint("node-child-ended")
        lived_s = (self.host.now_ns() - began_ns) / 1e9
        pause_s = self._decide_restart(child, code, lived_s)
        restarting, reason = isinstance(pause_s, float), pause_s if isinstance(pause_s, str) else ""
        exited = ev.ProcessExited(
            actor=child.name,
            boot_id=process.boot_id,
            code=code,
            restarting=restarting,
            reason=reason,
        )
        self.host.emit(exited, actor=child.name, code=code, restarting=restarting, reason=reason)
        if reason:
            self.host.notify_user(f"{child.name} ended with exit code {code}; {reason}")
        if isinstance(pause_s, float):
            if pause_s:
                self.host.log.info("not-at-once", actor=child.name, pause_s=pause_s)
                await self.host.sleep_for(pause_s)
            await self._launch_child(child)

    def _decide_restart(self, child: Child, code: int, lived_s: float) -> float | str:
        """The pause after which it is started again; else why it is not, if its end alone does not
        say that."""
        fenced = code == exit_codes.FENCED
        refused = fenced or (code == exit_codes.COORDINATOR_ABSENT and lived_s < TAKEN_S)
        healthy = child.role == "store" and (code < 0 or fenced)
        final = code in (exit_codes.COMPLETE, exit_codes.USER_ERROR) or self._stopping
        if final or not (child.role in self._restarted or healthy):
            return ""
        if refused:
            return child.limit.record_refusal(lived_s)
        if child.process is not None and child.cut_off == child.process.boot_id:
            return 0.0
        return child.limit.record_exit(self.host.now_ns() / 1e9)

    async def _kill_child(self, child: Child, order: cmd.RestartActor) -> None:
        """Have the stacks written, then end it, unless another has its place; the watcher does the
        rest."""
        process = child.process
        if process is None or process.returncode is not None or process.boot_id != order.boot_id:
            return
        if order.cut_off:
            child.cut_off = order.boot_id
        process.dump_stacks()
        await asyncio.sleep(DUMP_S)
        process.kill()
