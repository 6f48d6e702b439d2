"""The node's model: starts the processes of its machine, sees them end, starts some of them again.

Reads   RestartActor commands; the ends of its processes
Emits   ProcessExited, once per process that ended
"""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.sim.models.idle import Idle
from laminar.sim.process import EXIT_KILLED, SimProcess
from laminar.sim.scenario import seconds
from laminar.sim.scheduler import Action

DUMP_NS = seconds(0.5)
"""How long a process that is to be restarted has to write its stacks."""
GRACE_NS = seconds(10.0)
POLL_NS = seconds(0.1)
RESTARTED_ROLES = ("rollout", "relay")


class Node(Idle):
    """The processes of one machine."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__(process)
        self.restarts: dict[str, int] = {}
        self.stopping = False

    def start(self) -> None:
        for child in self.world.children_of(self.process.node):
            delay = 0.0 if self.world.faults.storm else self.chance.uniform(0, 0.5)
            self.process.after(seconds(delay), child.start)

    def handle(self, order: cmd.Order, command: Command) -> None:
        if isinstance(command, cmd.RestartActor):
            child = self.world.processes[command.actor]
            self.process.after(DUMP_NS, self._kill, child, child.boot)

    def _kill(self, child: SimProcess, boot: int) -> None:
        if child.boot == boot:
            child.die(EXIT_KILLED)

    def child_ended(self, child: SimProcess, boot_id: str, code: int) -> None:
        """Report it, and start a replica or relay that did not end by itself again."""
        restarts = self.restarts.get(child.name, 0)
        may = child.role in RESTARTED_ROLES and restarts < self.scenario.max_restarts
        may = may and not self.world.faults.dead_for_good(child)
        restarting = may and code != 0 and not self.stopping
        exited = ev.ProcessExited(
            actor=child.name, boot_id=boot_id, code=code, restarting=restarting
        )
        self.process.emit(exited)
        if restarting:
            self.restarts[child.name] = restarts + 1
            self.process.after(seconds(self.chance.uniform(0.1, 1.0)), self._start, child)

    def _start(self, child: SimProcess) -> None:
        if not child.alive and not self.stopping:
            child.start()

    def stop(self, gone: Action) -> None:
        """Children were told to stop as well; what is left after a while is killed."""
        self.stopping = True
        self._await_children(self.world.scheduler.now + GRACE_NS, gone)

    def _await_children(self, deadline_ns: int, gone: Action) -> None:
        living = [c for c in self.world.children_of(self.process.node) if c.alive]
        if living and self.world.scheduler.now < deadline_ns:
            self.process.after(POLL_NS, self._await_children, deadline_ns, gone)
            return
        for child in living:
            child.die(EXIT_KILLED)
        gone()
