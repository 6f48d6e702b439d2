"""Checks of leases: when a process may be declared lost, a node silent, or a restart ordered.

Reads   when a process was heard; what the coordinator says of silence; its orders to restart a
        process, and the timers of those
Raises  Violation

A process is lost after a whole lease of silence; while most machines are silent it is the long
lease, followed by another one. A machine is not lost while one of its processes is heard. A store
is restarted only if it cannot write, and is lost if the restart is late.
"""

from __future__ import annotations

from laminar.core.machine import StateMachine
from laminar.core.state import keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.names.roles import Role
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import MS
from tools.simulator.world import World

MACHINES_MIN = 3  #: fewest machines with a majority: of two, either may be the one that is cut off
_LOSSES = (
    FailureKind.STORE_LOST, FailureKind.TRAINER_LOST, FailureKind.RELAY_LOST,
    FailureKind.REPLICAS_LOST,
)  # fmt: skip
"""Losses of a process that its node might restart."""
_END_TIMERS = keys.deadline_timer(keys.CommandKey("end:"))
SILENT = 0.75  #: part of the short lease after which a machine counts as silent, with a margin


class Leases:
    """Times at which each process was last heard, and the members after the last event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._heard_ns: dict[str, int] = {}  #: times last heard, by boot id
        self._unread: list[str] = []  #: boot ids heard while the coordinator was paused
        self._late_ns: dict[str, int] = {}  #: when the coordinator read that, by boot id
        self._most_until_ns = -1  #: when one was last heard while most were silent
        #: (boot id, role) of each member, by machine
        self._members: dict[str, list[tuple[str, str]]] = {}
        self._membership = (-1, -1)
        self._ordered: dict[str, int] = {}  #: incarnations to be restarted, by name
        self.silent_nodes: dict[str, None] = {}

    def coordinator_started(self, machine: StateMachine) -> None:
        """Take over the silent nodes and members of a coordinator that has recovered."""
        self._membership = (-1, -1)
        if machine.started:
            silent = [a.name for a in machine.state.members.actors.values() if a.alive and a.silent]
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
        """Check an event that the coordinator has handled."""
        event = stamped.event
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                self._writes_in_time(stamped.event, command)
                self._ordered[command.actor] = state.members.actors[command.actor].incarnation
        if isinstance(event, ev.HeartbeatLost):
            self._lease_ran_out(state, event.actor, event.actor_incarnation)
            if state.run.phase not in (Phase.STOPPING, Phase.ENDED):  # machines leave
                self._most_are_heard(event.actor, event.silent_ms)
            self._none_speaks(event.actor)
            self.silent_nodes.pop(event.actor, None)
        elif isinstance(event, ev.NodeSilent):
            self._lease_ran_out(state, event.node, event.node_incarnation)
            self._one_speaks(event.node)
            self.silent_nodes[event.node] = None
        elif isinstance(event, ev.NodeRecovered):
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
        """Clear the silence of a node when its replacement has joined."""
        actor = state.members.actors.get(event.name)
        if actor is not None and actor.boot_id == event.boot_id:  # it was not refused
            self.silent_nodes.pop(event.name, None)

    def _lease_ran_out(self, state: State, name: str, incarnation: int) -> None:
        """Check lease_ran_out: only a process silent for a lease is declared lost or silent."""
        actor = state.members.actors.get(name)
        if actor is None or actor.incarnation != incarnation:
            return  # replaced since
        lease_ns, silent_ns = self._lease_ns(actor.role), self._silent_ns(actor.boot_id)
        if silent_ns < lease_ns:
            what = f"{name} was given up, but was heard {silent_ns / 1e6:.0f} ms ago"
            raise Violation("lease_ran_out", what, name)

    def _most_are_heard(self, name: str, silent_ms: int) -> None:
        """Check silent_majority_is_waited_for: no loss before the long lease if most are silent.

        When more than half of the machines are silent, the coordinator is the one that is cut off.
        Once they are heard again, all have another lease.
        """
        scenario = self._world.scenario
        if silent_ms >= self._world.config.coordinator.node_lease_ms:  # milliseconds are whole
            return
        ago_ns = self._world.scheduler.now - self._most_until_ns
        # measured from the start of its present lease, since leases may have restarted already
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
        """Check machine_is_silent: a node is lost only if no process of its machine is heard."""
        for boot_id, role in self._members.get(name, ()):
            if role == Role.NODE:
                continue
            silent_ns = self._silent_ns(boot_id)
            if silent_ns < self._lease_ns(role):
                what = f"{name} was given up, but {boot_id} was heard {silent_ns / 1e6:.0f} ms ago"
                raise Violation("machine_is_silent", what, name)

    def _one_speaks(self, node: str) -> None:
        """Check machine_is_silent: a node alone is silent only if its machine is heard."""
        since = self._world.scheduler.now - self._world.scenario.lease_ns
        heard = (
            max(ns.get(boot_id, 0) for ns in (self._heard_ns, self._late_ns))
            for boot_id, role in self._members.get(node, ())
            if role != Role.NODE
        )
        if all(at < since for at in heard):
            raise Violation("machine_is_silent", f"no process of {node} is heard either", node)

    def _silent_node_is_waited_for(self, stamped: Stamped, state: State) -> None:
        """Check silent_node_is_waited_for: no loss ends the run while its node is silent.

        The node may resume and restart the process. Its own messages may arrive before the next
        look at the leases finds that it is heard.
        """
        failed = state.run.failed
        if failed is None or failed.cause != stamped.seq or failed.kind not in _LOSSES:
            return
        node = state.members.actors[failed.subject].node
        waited = isinstance(stamped.event, ev.TimerFired) or stamped.peer == node
        if node in self.silent_nodes and not waited:
            raise Violation("silent_node_is_waited_for", failed.sentence, node)

    def _writes_in_time(self, event: Event, order: cmd.RestartActor) -> None:
        """Check store_writes_in_time: a store with heartbeats writes, unless its disk is full."""
        overdue = isinstance(event, ev.TimerFired) and event.timer.startswith(_END_TIMERS)
        if overdue and not self._world.database.full:
            raise Violation("store_writes_in_time", order.reason, order.actor)

    def _is_started_again_or_lost(self, state: State, timer: str) -> None:
        """Check overdue_restart: a process that its node did not restart in time is lost."""
        kind, subject = keys.parse_timer(timer)
        order, _, name = subject.partition(":")
        if (kind, order) != (keys.TimerKind.COMMAND, "restart"):
            return
        actor = state.members.actors[name]
        if actor.alive and actor.incarnation == self._ordered.get(name):
            what = f"{actor.node} did not restart {name}, which counts as alive"
            raise Violation("overdue_restart", what, name)

    def _note_members(self, state: State) -> None:
        membership = (indexes_of(state).num_alive, state.members.next_incarnation)
        if membership != self._membership:
            self._membership = membership
            self._members = {}
            for actor in state.members.actors.values():
                if actor.alive:
                    self._members.setdefault(actor.node, []).append((actor.boot_id, actor.role))

    def _silent_ns(self, boot_id: str) -> int:
        return self._world.scheduler.now - self._heard_ns.get(boot_id, 0)

    def _lease_ns(self, role: str) -> int:
        return self._world.scenario.lease_of_ms(role) * MS
