"""Checks of what nodes report of their processes: each exit once, with its code, and restarts.

Reads   the exits of processes as their nodes learn them, what nodes report, the starts of processes
        that the coordinator orders restarted, the processes that a node kills
Raises  Violation; for what a node owes, only once it had time for it, neither paused nor ending
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.core.members.membership import OTHER_NODE
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from tools.simulator.context import Process
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import SECOND
from tools.simulator.world import World

LOOKS, LOOK_NS = 6, 5 * SECOND
"""Number of looks and the time between them: a node that is paused between two has the others."""


class NodeReports:
    """Process exits of one run that their nodes know of."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: dict[str, int] = {}  #: exit codes by boot id
        self._reported: dict[str, bool] = {}  #: whether it is restarted, by boot id
        self._told: set[str] = set()  #: boot ids that a node is to restart

    def node_started(self, node: Process) -> None:
        """Note that the coordinator has accepted a node, perhaps in place of one that died."""
        before = {child.name: child.boot for child in self._world.children_of(node.name)}
        self._later(node, self._has_started_all, node, before)

    def _has_started_all(self, node: Process, before: dict[str, int]) -> None:
        """Check node_starts_its_processes: a new node starts each, whatever the old one started."""
        for child in self._world.children_of(node.name):
            if child.boot == before[child.name] and not child.alive:
                what = f"{node.boot_id} has not started {child.name}"
                raise Violation("node_starts_its_processes", what, node.name)

    def refusals(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Check own_processes_are_taken: the living process of a living node is not refused."""
        event = stamped.event
        for command in commands:
            if not isinstance(event, ev.ActorJoined) or not isinstance(command, cmd.RefuseActor):
                continue
            node = state.members.actors.get(event.node)
            its_own = node is not None and node.alive and node.boot_id == event.node_boot
            if its_own and command.reason == OTHER_NODE.format(event.node):
                what = f"{event.boot_id} of {event.node_boot} is refused: {command.reason}"
                raise Violation("own_processes_are_taken", what, event.name)

    def ordered(self, commands: list[Command], state: State) -> None:
        """Note the boot ids of the processes that the coordinator orders restarted."""
        for command in commands:
            if isinstance(command, cmd.RestartActor):
                self._told.add(state.members.actors[command.actor].boot_id)

    def killed(self, node: Process, boot_id: str) -> None:
        """Check order_ends_whom_it_means: a node kills only the boot that the order means."""
        if not node.stopping and boot_id not in self._told:
            what = f"{node.boot_id} kills {boot_id} without an order"
            raise Violation("order_ends_whom_it_means", what, node.name)

    def failed(self, stamped: Stamped, state: State) -> None:
        """Check machine_comes_back: no run fails for lack of a node that could be restarted."""
        event, failed = stamped.event, state.run.failed
        if failed is None or not isinstance(event, ev.TimerFired):
            return
        kind, _ = keys.parse_timer(event.timer)
        process = self._world.processes.get(failed.subject)
        if (
            kind != keys.TimerKind.REJOIN
            or process is None
            or state.members.is_actor_alive(process.node)
        ):
            return
        if not self._world.faults.is_gone(self._world.processes[process.node]):
            raise Violation("machine_comes_back", failed.sentence, process.node)

    def ended(self, node: Process, boot_id: str, code: int) -> None:
        """Note that a node has learned of the exit of one of its processes."""
        self._ended[boot_id] = code
        self._later(node, self._is_reported, boot_id)

    def sent(self, node: Process, event: ev.ProcessExited) -> None:
        """Check exit_is_reported_once, with the code of the exit."""
        code, boot_id = self._ended.get(event.boot_id), event.boot_id
        if boot_id in self._reported or code != event.code:
            what = f"{node.name} reports {event!r}; it ended with {code}"
            raise Violation("exit_is_reported_once", what, event.actor)
        self._reported[boot_id] = event.restarting
        self._is_given_up_for_a_reason(event)
        if event.restarting:
            process = self._world.processes[event.actor]
            self._later(node, self._is_started, process, boot_id)

    def _is_given_up_for_a_reason(self, event: ev.ProcessExited) -> None:
        """Check cuts_are_not_counted: a process struck by cuts alone is not given up."""
        process, faults = self._world.processes[event.actor], self._world.faults
        if event.reason and faults.only_cut_off(process):
            what = f"{event.boot_id} was only cut off; {event.reason}"
            raise Violation("cuts_are_not_counted", what, event.actor)

    def left(self, node: Process, alive: list[str]) -> None:
        """Check machine_is_left_empty: a node that ends gracefully has ended its processes."""
        if alive:
            what = f"{node.name} ends, but {', '.join(alive)} continue"
            raise Violation("machine_is_left_empty", what, node.name)

    def _is_reported(self, boot_id: str) -> None:
        if boot_id not in self._reported:
            raise Violation("exit_is_reported_once", f"the end of {boot_id} is not reported")

    def _is_started(self, process: Process, ended: str) -> None:
        """Check who_is_started_again: a node restarts each process that it says it restarts."""
        if process.boot_id == ended:
            raise Violation("who_is_started_again", f"{ended} is not restarted", process.name)

    def _later(self, node: Process, look: Callable[..., None], *args: object) -> None:
        node.call_later(LOOK_NS, self._again, LOOKS, node, look, args)

    def _again(
        self, left: int, node: Process, look: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        if node.stopping:
            return
        if left > 1:
            node.call_later(LOOK_NS, self._again, left - 1, node, look, args)
        else:
            look(*args)
