"""Planted bugs in the node: what it says of its processes and does with them.

Reads   nothing
Gives   NODE_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laminar.actors.host import Host
from laminar.actors.node import Child, Node
from laminar.core import membership, recovery
from laminar.core.context import Context
from laminar.core.state import State
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.sim.runtime import machines
from tools.rows.planted import Planter


def engine_that_does_not_come_up_is_not_missed(plant: Planter) -> None:
    watch = recovery.watch_progress

    def planted(ctx: Context, name: str) -> None:
        if name in ctx.state.replicas:
            watch(ctx, name)

    plant.replace(recovery, "watch_progress", planted)


def exit_is_not_reported(plant: Planter) -> None:
    emit = Host.emit

    def planted(self: Host, event: Event, **context: Any) -> None:
        if not isinstance(event, ev.ProcessExited):
            emit(self, event, **context)

    plant.replace(Host, "emit", planted)


def exit_is_reported_twice(plant: Planter) -> None:
    emit = Host.emit

    def planted(self: Host, event: Event, **context: Any) -> None:
        emit(self, event, **context)
        if isinstance(event, ev.ProcessExited):
            emit(self, event, **context)

    plant.replace(Host, "emit", planted)


def exit_is_reported_of_the_first_process(plant: Planter) -> None:
    """Whichever of this name has ended."""
    emit, first = Host.emit, dict[tuple[str, str], str]()

    def planted(self: Host, event: Event, **context: Any) -> None:
        if isinstance(event, ev.ProcessExited):
            boot_id = first.setdefault((self.boot_id, event.actor), event.boot_id)
            event = msgspec.structs.replace(event, boot_id=boot_id)
        emit(self, event, **context)

    plant.replace(Host, "emit", planted)


def ended_process_is_not_started_again(plant: Planter) -> None:
    """Though its node has said so."""
    launch = Node._launch

    async def planted(self: Node, child: Child) -> None:
        if child.process is None:
            await launch(self, child)

    plant.replace(Node, "_launch", planted)


def node_leaves_before_its_processes(plant: Planter) -> None:
    async def planted(self: Node) -> None:
        self._stopping = True
        await self._processes.close()

    plant.replace(Node, "stop", planted)


def dead_node_is_not_started_again(plant: Planter) -> None:
    plant.replace(machines, "node_again", lambda limit, code, now_s: "")


def new_node_forgets_a_process(plant: Planter) -> None:
    """It starts one less than the node in whose place it is."""
    start = Node.start

    async def planted(self: Node) -> None:
        if not self.host.boot_id.endswith("/1"):
            self.children.pop(next(iter(self.children)))
        await start(self)

    plant.replace(Node, "start", planted)


def processes_of_a_new_node_are_refused(plant: Planter) -> None:
    """Only those of the first one belong to it."""

    def planted(state: State, event: ev.ActorJoined) -> bool:
        return event.role == "node" or event.node_boot.endswith("/1")

    plant.replace(membership, "_of_its_node", planted)


def node_of_the_store_is_refused_while_the_run_ends(plant: Planter) -> None:
    joins_late = membership._joins_late

    def planted(state: State, event: ev.ActorJoined) -> bool:
        return event.role != "node" and joins_late(state, event)

    plant.replace(membership, "_joins_late", planted)


NODE_BUGS: tuple[Callable[[Planter], None], ...] = (
    engine_that_does_not_come_up_is_not_missed,
    exit_is_not_reported,
    exit_is_reported_twice,
    exit_is_reported_of_the_first_process,
    ended_process_is_not_started_again,
    node_leaves_before_its_processes,
    dead_node_is_not_started_again,
    new_node_forgets_a_process,
    processes_of_a_new_node_are_refused,
    node_of_the_store_is_refused_while_the_run_ends,
)
