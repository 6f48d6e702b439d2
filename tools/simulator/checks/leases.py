"""Checks of who is given up: after a whole lease of silence, the long one while most machines are
silent, another one after that, and a machine not while it speaks; and of whom a node is ordered to
start again: a store only if it cannot write, and lost if that is late.

Reads   when a process was heard; what the coordinator says of silence; its orders to start one
        again, and the timers of those
Raises  Violation
"""

from __future__ import annotations

from laminar.core.machine import StateMachine
from laminar.core.state import keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.roles import Role
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import MS
from tools.simulator.world import World

MACHINES_MIN = 3
"""Of two machines, one that is not heard is no more likely to be at fault than the other."""
_LOSSES = (
    FailureKind.STORE_LOST, FailureKind.TRAINER_LOST, FailureKind.RELAY_LOST,
    FailureKind.REPLICAS_LOST,
)  # fmt: skip
"""Of a process that its node might start again."""
SILENT = 0.75
"""Part of the short lease after which a machine is not heard, by a margin."""


class Leases:
    """When each process was heard last, and which were members after the last event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._heard_ns: dict[str, int] = {}  #: by boot id
        self._unread: list[str] = []  #: boot ids that were heard while the coordinator stood still
        self._late_ns: dict[str, int] = {}  #: when it read that, by boot id
        self._most_until_ns = -1  #: when a process was heard again while most machines were silent
        #: by machine: (boot id, role) of each member
        self._members: dict[str, list[tuple[str, str]]] = {}
        self._membership = (-1, -1)
        self._ordered: dict[str, int] = {}  #: incarnation of whom a node is to start again, by name
        self.silent_nodes: dict[str, None] = {}

    def coordinator_started(self, machine: StateMachine) -> None:
        """A successor has recovered."""
        self._membership = (-1, -1)
        if machine.started:
            silent = [a.name for a in machine.state.actors.values() if a.alive and a.silent]
            self.silent_nodes = dict.fromkeys(silent)
            self._note_members(machine.state)

    def heard(self, boot_id: str) -> None:
        now_ns = self._world.scheduler.now
        silent_ns = now_ns - self._heard_ns.get(boot_id, now_ns)
        if silent_ns > SILENT * self._world.scenario.lease_ns and self._most_are_silent():
            self._most_until_ns = now_ns
        self._heard_ns[boot_id] = now_ns

    def not_read_yet(self, boot_id: str) -> None:
        self._unread.append(boot_id)

    def read_late(self) -> None:
        self._late_ns |= dict.fromkeys(self._unread, self._world.scheduler.now)
        self._unread.clear()

    def observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """The coordinator has handled an event."""
        event = stamped.event
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                self._writes_in_time(command)
                self._ordered[command.actor] = state.actors[command.actor].incarnation
        if isinstance(event, ev.HeartbeatLost):
            self._lease_ran_out(state, event.actor, event.actor_incarnation)
            self._most_are_heard(event.actor, event.silent_ms)
            self._none_speaks(event.actor)
            self.silent_nodes.pop(event.actor, None)
        elif isinstance(event, ev.NodeSilent):
            self._lease_ran_out(state, event.node, event.node_incarnation)
            self._one_speaks(event.node)
            self.silent_nodes[event.node] = None
        elif isinstance(event, ev.NodeHeard):
            self.silent_nodes.pop(event.node, None)
        elif isinstance(event, ev.RunResumed):
            self.silent_nodes.clear()
        elif isinstance(event, ev.ActorJoined):
            self._note_joined(state, event)
        elif isinstance(event, ev.TimerFired):
            self._is_started_again_or_lost(state, event.timer)
        self._silent_node_is_waited_for(stamped, state)
        self._note_members(state)

    def _note_joined(self, state: State, event: ev.ActorJoined) -> None:
        """Perhaps a node in the place of a silent one."""
        actor = state.actors.get(event.name)
        if actor is not None and actor.boot_id == event.boot_id:  # it was not refused
            self.silent_nodes.pop(event.name, None)

    def _lease_ran_out(self, state: State, name: str, incarnation: int) -> None:
        """lease_ran_out: only who was silent for a lease is given up, or said to be silent."""
        actor = state.actors.get(name)
        if actor is None or actor.incarnation != incarnation:
            return  # replaced since
        lease_ns, silent_ns = self._lease_ns(actor.role), self._silent_ns(actor.boot_id)
        if silent_ns < lease_ns:
            what = f"{name} was given up, but was heard {silent_ns / 1e6:.0f} ms ago"
            raise Violation("lease_ran_out", what, name)

    def _most_are_heard(self, name: str, silent_ms: int) -> None:
        """silent_majority_is_waited_for: when more than half of the machines are not heard, it is
        the coordinator that is cut off, and nobody is given up before the long lease; then all have
        another lease."""
        scenario = self._world.scenario
        if silent_ms >= scenario.node_lease_ms:  # whole milliseconds: of silence beyond it
            return
        ago_ns = self._world.scheduler.now - self._most_until_ns
        # as long before as its present lease had begun, for leases may have begun anew already
        noticed = silent_ms * MS - ago_ns > SILENT * scenario.lease_ns
        just = noticed and self._most_until_ns >= 0 and ago_ns < SILENT * scenario.lease_ns
        if just or self._most_are_silent():
            since = f"were silent {ago_ns / 1e6:.0f} ms ago" if just else "are silent"
            what = f"{name} was given up after {silent_ms} ms, and most machines {since}"
            raise Violation("silent_majority_is_waited_for", what, name)

    def _most_are_silent(self) -> bool:
        since_ns = SILENT * self._world.scenario.lease_ns
        quiet = [
            min(self._silent_ns(boot_id) for boot_id, _ in members) > since_ns
            for members in self._members.values()
        ]
        return len(quiet) >= MACHINES_MIN and 2 * sum(quiet) > len(quiet)

    def _none_speaks(self, name: str) -> None:
        """machine_is_silent: a node is given up with its machine, when none of it is heard."""
        for boot_id, role in self._members.get(name, ()):
            if role == Role.NODE:
                continue
            silent_ns = self._silent_ns(boot_id)
            if silent_ns < self._lease_ns(role):
                what = f"{name} was given up, but {boot_id} was heard {silent_ns / 1e6:.0f} ms ago"
                raise Violation("machine_is_silent", what, name)

    def _one_speaks(self, node: str) -> None:
        """machine_is_silent: a node is silent alone only if a process of its machine is heard."""
        since = self._world.scheduler.now - self._world.scenario.lease_ns
        heard = (
            max(ns.get(boot_id, 0) for ns in (self._heard_ns, self._late_ns))
            for boot_id, role in self._members.get(node, ())
            if role != Role.NODE
        )
        if all(at < since for at in heard):
            raise Violation("machine_is_silent", f"no process of {node} is heard either", node)

    def _silent_node_is_waited_for(self, stamped: Stamped, state: State) -> None:
        """No run ends at once for a process whose node is silent: that may go on and start it. What
        the node says itself may be known before a look at the leases finds that it speaks."""
        failed = state.failed
        if failed is None or failed.cause != stamped.seq or failed.kind not in _LOSSES:
            return
        node = state.actors[failed.subject].node
        waited = isinstance(stamped.event, ev.TimerFired) or stamped.peer == node
        if node in self.silent_nodes and not waited:
            raise Violation("silent_node_is_waited_for", failed.sentence, node)

    def _writes_in_time(self, order: cmd.RestartActor) -> None:
        """store_writes_in_time: nothing keeps a store that speaks from it but a full disk."""
        overdue = order.reason.startswith(cmd.EndTrajectories.__name__)
        if overdue and not self._world.database.full:
            raise Violation("store_writes_in_time", order.reason, order.actor)

    def _is_started_again_or_lost(self, state: State, timer: str) -> None:
        """overdue_restart: whom its node has not started again in time is lost."""
        kind, subject = keys.parse_timer(timer)
        order, _, name = subject.partition(":")
        if (kind, order) != (keys.TimerKind.COMMAND, "restart"):
            return
        actor = state.actors[name]
        if actor.alive and actor.incarnation == self._ordered.get(name):
            what = f"{actor.node} did not restart {name}, which counts as alive"
            raise Violation("overdue_restart", what, name)

    def _note_members(self, state: State) -> None:
        membership = (indexes_of(state).num_alive, state.next_incarnation)
        if membership != self._membership:
            self._membership = membership
            self._members = {}
            for actor in state.actors.values():
                if actor.alive:
                    self._members.setdefault(actor.node, []).append((actor.boot_id, actor.role))

    def _silent_ns(self, boot_id: str) -> int:
        return self._world.scheduler.now - self._heard_ns.get(boot_id, 0)

    def _lease_ns(self, role: str) -> int:
        return self._world.scenario.lease_of_ms(role) * MS
