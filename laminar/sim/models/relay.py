"""The relay of a simulated machine: the real actor, over memory and connections in virtual time.

Gives   Relay
"""

from __future__ import annotations

from laminar.actors import relay
from laminar.actors.host import Actor, Host
from laminar.sim.interfaces import Process
from laminar.sim.models.idle import Idle
from laminar.sim.models.relay_machine import SimMachine


class Relay(Idle):
    """What one boot of it has of its machine."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.machine = SimMachine(process)

    def make_actor(self, host: Host) -> Actor:
        return relay.Relay(host, self.machine)
