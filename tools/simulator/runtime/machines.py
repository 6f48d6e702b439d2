"""Restarts of nodes by `laminar train`, in virtual time.

Reads   the ends of nodes
Gives   Machines, which restarts them after the pauses of actors/restart_limit.py

A node that a fault has lost for good is not restarted: its machine or its starter is gone.
"""

from __future__ import annotations

from laminar.actors.restart_limit import RestartLimit, decide_node_restart
from tools.simulator.context import Context
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds, stream
from tools.simulator.scheduler import SECOND

START_S = (0.2, 2.0)
"""Time from the end of a node to the start of its successor, without the pause."""


class Machines:
    """The machines of one world."""

    def __init__(self, world: Context) -> None:
        self._world = world
        self._limits: dict[str, RestartLimit] = {}
        self._chance = stream(world.scenario.seed, "machines")
        self._dead = False

    def die(self) -> None:
        """Stop all restarts: `laminar train` is gone."""
        self._dead = True

    def ended(self, node: SimProcess, code: int) -> None:
        """Restart an ended node, unless the run is over or the node is lost for good."""
        world = self._world
        if world.finished or world.faults.is_gone(node):
            return
        limit = self._limits.setdefault(node.name, RestartLimit(world.config))
        now = world.scheduler.now
        pause_s = decide_node_restart(limit, code, (now - node.started_ns) / SECOND, now / SECOND)
        if isinstance(pause_s, float):
            delay_s = pause_s + self._chance.uniform(*START_S)
            world.scheduler.after(seconds(delay_s), self._start, node)

    def _start(self, node: SimProcess) -> None:
        world = self._world
        if not (self._dead or node.alive or world.finished or world.faults.is_gone(node)):
            world.coverage.hit("node:started-again")
            node.start()
