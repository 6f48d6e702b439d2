"""What nodes say of their processes: each end once, as it was, and who is started again.

Reads   the ends of processes as their nodes learn them, what nodes report, the starts of processes
Gives   `given_up`, who is not started again
Raises  Violation, once a node had time for what it owes: not while it stands still or ends
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.events import events as ev
from laminar.sim.interfaces import Process, World
from laminar.sim.runtime.scheduler import SECOND
from laminar.sim.runtime.violation import Violation

LOOKS, LOOK_NS = 6, 5 * SECOND
"""So often and after so long: a node that stands still between two of them has had the others."""


class NodeReports:
    """The ends of one run's processes that their nodes know."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: dict[str, int] = {}  #: exit codes by boot id
        self._reported: dict[str, bool] = {}  #: by boot id: it is started again
        self.given_up: dict[str, None] = {}  #: actors that are not

    def ended(self, node: Process, boot_id: str, code: int) -> None:
        """A node learns that one of its processes has ended."""
        self._ended[boot_id] = code
        self._later(node, self._is_reported, boot_id)

    def sent(self, node: Process, event: ev.ProcessExited) -> None:
        """exit_is_reported_once: with the code that it had."""
        code, boot_id = self._ended.get(event.boot_id), event.boot_id
        if boot_id in self._reported or code != event.code:
            what = f"{node.name} reports {event!r}; it ended with {code}"
            raise Violation("exit_is_reported_once", what, event.actor)
        self._reported[boot_id] = event.restarting
        if not event.restarting:
            self.given_up[event.actor] = None
        else:
            process = self._world.processes[event.actor]
            self._later(node, self._is_started, process, boot_id)

    def left(self, node: Process, alive: list[str]) -> None:
        """machine_is_left_empty: a node that ends in good order has ended its processes."""
        if alive:
            what = f"{node.name} ends, and {', '.join(alive)} go on"
            raise Violation("machine_is_left_empty", what, node.name)

    def _is_reported(self, boot_id: str) -> None:
        if boot_id not in self._reported:
            raise Violation("exit_is_reported_once", f"the end of {boot_id} is not reported")

    def _is_started(self, process: Process, ended: str) -> None:
        """who_is_started_again: the processes of which a node has said that it starts them
        again."""
        if process.boot_id == ended:
            raise Violation("who_is_started_again", f"{ended} is not started again", process.name)

    def _later(self, node: Process, look: Callable[..., None], *args: object) -> None:
        node.after(LOOK_NS, self._again, LOOKS, node, look, args)

    def _again(
        self, left: int, node: Process, look: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        if node.stopping:
            return
        if left > 1:
            node.after(LOOK_NS, self._again, left - 1, node, look, args)
        else:
            look(*args)
