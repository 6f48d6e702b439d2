"""What the parts of every role in the simulator do unless they have something better to do.

Gives   Idle, the base of all of them
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from laminar.actors.host import Actor, Host

if TYPE_CHECKING:
    from tools.simulator.runtime.process import SimProcess


class Idle:
    """What one boot of a process has of the world."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process
        self.world = process.world
        self.scenario = process.world.scenario
        self.chance = process.world.chance_of(process)

    @abstractmethod
    def make_actor(self, host: Host) -> Actor:
        """The real one, over this."""

    def pause(self) -> None:
        """Time that passes from now on must not count."""

    def resume(self) -> None:
        """Time counts again."""
