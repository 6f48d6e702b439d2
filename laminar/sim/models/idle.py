"""What every model does unless it has something better to do.

Reads   nothing
Gives   Idle, the base of all models
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laminar.events import commands as cmd
from laminar.events.base import Command
from laminar.sim.scheduler import Action

if TYPE_CHECKING:
    from laminar.sim.process import SimProcess


class Idle:
    """A process that does nothing."""

    listens = True  #: to requests of other processes

    def __init__(self, process: SimProcess) -> None:
        self.process = process
        self.world = process.world
        self.scenario = process.world.scenario
        self.chance = process.world.chance_of(process)

    def start(self) -> None:
        """Get ready and report it."""

    def handle(self, order: cmd.Order, command: Command) -> None:
        """Carry out a command."""

    def answer(self, client: str, request: Any) -> Any:
        raise TypeError(f"{self.process.name} serves nobody, and {client} asks for {request!r}")

    def pause(self) -> None:
        """Time that passes from now on must not count."""

    def resume(self) -> None:
        """Time counts again."""

    def stop(self, gone: Action) -> None:
        """The process ends in good order; call `gone` when it may."""
        gone()
