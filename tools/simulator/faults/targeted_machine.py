"""Targeted faults of whole machines: one dies in a short phase, and comes back with a new node.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Effects: all processes of a machine die at once
Gives   MachineInPhase, for TARGETED (targeted_faults.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.names.roles import Role
from tools.simulator.faults.effects import Effects
from tools.simulator.faults.targeted import TargetedFault

FIRST = "node-0"
TIMES = 2  #: most deaths of the machine in one phase


def _training(state: State) -> bool:
    return keys.TRAIN in state.orders.commands


def _publishing(state: State) -> bool:
    return state.versions.newest >= 0 and keys.WEIGHTS in state.orders.timers


def _repeating(state: State) -> bool:
    return keys.LOAD in state.orders.commands or keys.REPEAT in state.orders.commands


def _starting(state: State) -> bool:
    """Return whether some processes have joined, the trainer among them, and not all are ready."""
    return state.run.phase == Phase.STARTING and bool(indexes_of(state).roles.get(Role.TRAINER))


def _exporting(state: State) -> bool:
    return keys.EXPORT in state.orders.commands


def _evaluating(state: State) -> bool:
    return state.run.phase == Phase.FINAL_EVALUATION


def _ending(state: State) -> bool:
    """Return whether the store is writing the last ends."""
    return state.run.phase == Phase.ENDING and bool(state.work.groups)


PHASES: tuple[Callable[[State], bool], ...] = (
    _training, _publishing, _repeating, _starting, _exporting, _evaluating, _ending, _ending,
    _ending,
)  # fmt: skip
"""Phases to strike in; the last is short and rare, hence three times as likely."""


class MachineInPhase(TargetedFault):
    """Death of the machine of store and trainer in a given phase, once or twice."""

    kind = "machine-dies-in-phase"
    share = 1.0
    after_healing = True  # the last phases mostly come after healing

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._is_in_phase = chance.choice(PHASES)
        self._left = chance.randint(1, TIMES)

    def look(self, state: State) -> None:
        if self._is_in_phase(state) and self.faults.restart_machine(self.world.processes[FIRST]):
            self.struck()
            self._left -= 1
            self.done = not self._left
