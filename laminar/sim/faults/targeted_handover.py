"""A targeted fault of hand-overs: one of the two replicas is lost, or the source answers too late.

Reads   which replicas hand trajectories over
Gives   LostInHandover
"""

from __future__ import annotations

import random

from laminar.core import keys
from laminar.core.state import Replica, State
from laminar.sim.faults.effects import Effects
from laminar.sim.faults.targeted import HELD, TargetedFault

STRIKES_MAX = 3


class LostInHandover(TargetedFault):
    """Before the source has said that the store has all of it, or after that, while it goes on at
    its destination and nothing of it has been heard from there."""

    kind = "lost-in-hand-over"
    share = 1.0  # many runs hand nothing over

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._released = chance.random() < 0.4
        self._whom = chance.choice(("source", "destination", "late"))
        self._strikes = 0

    def look(self, state: State) -> None:
        if self.now < self.from_ns or not state.settings.repack_policy:
            return
        for replica in state.replicas.values():
            if replica.given and self._is_due(state, replica):
                return self._strike(state, replica)

    def _is_due(self, state: State, source: Replica) -> bool:
        return self._released == (keys.release(source.name) not in state.commands)

    def _strike(self, state: State, source: Replica) -> None:
        given = next(iter(source.given))
        destination = state.progress[given].destination or state.trajectories[given].replica
        self._strikes += 1
        self.done = self._strikes >= STRIKES_MAX
        self.struck()
        if self._whom == "late":
            process = self.world.processes[source.name]
            self.faults.pause(process, HELD * self.faults.lease_of_s(process.role))
        else:
            self.lose(source.name if self._whom == "source" or not destination else destination)
