"""The node actor: starts, watches and restarts the actor processes of one machine.

Reads   RestartActor commands; exit codes of its children
Emits   ProcessExited, once per actor that ended

A child that ends by a signal or a fault, without the coordinator's order, is restarted within the
limits of restart_limit.py, if its role permits (names/roles.py). A store does if it was killed,
since all data that it acknowledged is on disk, but not if it reported why it cannot continue. A
child with the exit code of a user's mistake is never restarted, since it would meet the same
mistake. Restarts do not count after a refusal: the coordinator gave the process up for its
silence, or accepts no processes, for example while the run ends. Nor do they count if the whole
machine was silent, since nothing is wrong with the process.
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
from laminar.names.roles import ROLE_TABLE, Restart

GRACE_S = 10.0  #: time limit for children to flush and leave once the run stops
DUMP_S = 0.5  #: time for a stalled child to write its stacks before it is killed


class ChildProcess(Protocol):
    """A child process. A signal to one that has ended does nothing."""

    @property
    def pid(self) -> int: ...

    @property
    def boot_id(self) -> str:
        """The id NAME-BOOT, unique to this process in the run."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it lives."""
        ...

    async def wait(self) -> int:
        """Wait for the child's end and return its returncode."""

    def dump_stacks(self) -> None:
        """Have the child write the stacks of its threads."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Processes(Protocol):
    """The operating system's processes of this machine."""

    def prepare_launches(self) -> None:
        """Get ready to launch processes."""

    async def launch_actor(self, name: str, role: str) -> ChildProcess:
        """Start a new process of this actor; RuntimeError if that is impossible."""

    async def close(self) -> None:
        """Clean up after all processes have ended, and launch no more."""


@dataclass
class Child:
    """An actor slot of this machine, and its present process."""

    name: str
    role: str
    limit: RestartLimit
    process: ChildProcess | None = None
    cut_off: str = ""  #: boot id of a process that is ended because its machine was silent


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
        self._stopping = False
        self._launching = asyncio.Lock()  #: held to launch one process at a time

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
        """Wait for the children to leave, on the coordinator's order or now; then kill them."""
        self._stopping = True
        async with self._launching:  # until a launch in progress is recorded
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
            process.kill()  # the coordinator does not know it, so cannot order it to leave
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
                self.host.log.info("restart-delayed", actor=child.name, pause_s=pause_s)
                await self.host.sleep_for(pause_s)
            await self._launch_child(child)

    def _decide_restart(self, child: Child, code: int, lived_s: float) -> float | str | None:
        """Return the pause before a restart, or the reason against one.

        None: the exit code is reason enough.
        """
        fenced = code == exit_codes.FENCED
        refused = fenced or (code == exit_codes.COORDINATOR_ABSENT and lived_s < TAKEN_S)
        disk = code == exit_codes.LOG_UNWRITABLE
        may_restart = {
            Restart.ALWAYS: True,
            Restart.IF_KILLED: code < 0 or fenced or disk,
            Restart.WITH_CHECKPOINTS: self.host.config.trainer.save_freq > 0,
        }[ROLE_TABLE[child.role].restart]
        final = code in (exit_codes.COMPLETE, exit_codes.USER_ERROR) or self._stopping
        if final or not may_restart:
            return None
        if refused or (disk and lived_s < TAKEN_S):
            return child.limit.record_refusal(lived_s)
        if child.process is not None and child.cut_off == child.process.boot_id:
            return 0.0
        return child.limit.record_exit(self.host.now_ns() / 1e9)

    async def _kill_child(self, child: Child, order: cmd.RestartActor) -> None:
        """Have the stacks written, then kill the process, unless it was replaced already."""
        process = child.process
        if process is None or process.returncode is not None or process.boot_id != order.boot_id:
            return
        if order.cut_off:
            child.cut_off = order.boot_id
        process.dump_stacks()
        await asyncio.sleep(DUMP_S)
        process.kill()
