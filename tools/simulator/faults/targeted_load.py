"""Targeted faults of loads in flight: lost or late participants, cuts, wrong weights, evaluations.

Reads   which replicas load weights while they run
Writes  the world, through Effects: processes are lost or held up, a proof fails, lines are cut
Gives   the faults of that kind, for TARGETED (targeted_faults.py)
"""

from __future__ import annotations

import random
from abc import abstractmethod

from laminar.core.state import keys
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events.reasons import PullPurpose
from tools.simulator.faults.effects import EVERYBODY, Effects
from tools.simulator.faults.targeted import HELD, TargetedFault

STRIKES_MAX = 3
STORE = "store-0"
LOAD = 2.0  #: load times from an order until the weights are verified, without the flush before it
LOADS_MAX = 3  #: most loads in a row that prove wrong; the second in a row restarts the replica


class LoadFault(TargetedFault):
    """Fault that looks for a replica just told to load while it runs; strikes a few times."""

    share = 1.0  # few runs have weights in flight

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._known: set[int] = set()  #: orders already looked at
        self._strikes = 0

    def look(self, state: State) -> None:
        if self.now < self.from_ns or not state.settings.in_flight:
            return
        for replica in state.members.replicas.values():
            order = loads_in_flight(state, replica)
            if order and order not in self._known:
                self._known.add(order)
                self.struck()
                return self.strike(state, replica)

    @abstractmethod
    def strike(self, state: State, replica: Replica) -> None:
        """Strike once; the replica has not received the order yet."""

    def struck(self) -> None:
        super().struck()
        self._strikes += 1
        self.done = self._strikes >= STRIKES_MAX

    def soon(self) -> float:
        """Return random seconds, at most until the weights are verified."""
        world = self.world.scenario.world
        return self.chance.uniform(0, LOAD) * (world.load_s + 4 * world.delay_ms / 1000)


class LostInLoad(LoadFault):
    """Loss of a replica before it gets the order, during the load, or once it has resumed."""

    kind = "lost-in-load"

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._loading: dict[str, int] = {}  #: replicas to be lost with the version that they load

    def look(self, state: State) -> None:
        for name, version in self._loading.items():
            replica = state.members.replicas.get(name)
            if replica is None or (replica.version >= version and replica.running):
                self._loading.pop(name)
                return self._lose_later(name)
        super().look(state)

    def strike(self, state: State, replica: Replica) -> None:
        when = self.chance.choice(("before", "in", "after"))
        if when == "before":
            self.lose(replica.name)
        elif when == "in":
            self.faults.later(self.soon(), self._lose_later, replica.name)
        else:
            self._loading[replica.name] = state.members.newest_for(replica)
            self.done = False

    def _lose_later(self, name: str) -> None:
        self.done = self._strikes >= STRIKES_MAX and not self._loading
        if not self.faults.healed:
            self.lose(name)


class ProofFails(LoadFault):
    """Weights that prove wrong; what ran with them continues elsewhere.

    Mostly they prove wrong once or twice more when the replica, empty by then, reloads them.
    """

    kind = "load-proves-wrong"

    def strike(self, state: State, replica: Replica) -> None:
        self.faults.wrong[replica.name] = self.chance.randrange(1, LOADS_MAX + 1)


class StoreCutInLoad(LoadFault):
    """Cut between the replica and the store while the replica flushes what it has sampled."""

    kind = "store-cut-in-load"

    def strike(self, state: State, replica: Replica) -> None:
        duration_s = self.faults.lease_s * self.chance.choice((0.1, 0.5, 2.0))
        self.faults.cut(replica.name, STORE, duration_s)
        if self.chance.random() < 0.5:
            self.faults.cut(STORE, replica.name, duration_s)


class CoordinatorInLoad(LoadFault):
    """Kill of the coordinator between the order and the report of the load."""

    kind = "coordinator-killed-in-load"

    def strike(self, state: State, replica: Replica) -> None:
        self.faults.later(self.soon(), self._kill)

    def _kill(self) -> None:
        if not self.faults.healed:
            self.faults.harm(EVERYBODY)
            self.world.coordinator.kill()


class EvaluationInLoad(LoadFault):
    """Evaluation that begins while replicas load in flight: all but one are paused."""

    kind = "evaluation-in-load"

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._index = -1  #: index of the latest evaluation seen

    def look(self, state: State) -> None:
        if self.now < self.from_ns or not state.settings.in_flight:
            return
        found = {r.name: loads_in_flight(state, r) for r in state.members.replicas.values()}
        loading = {name: order for name, order in found.items() if order}
        evaluation = state.evaluations.running
        if evaluation is not None and evaluation.index != self._index:
            self._index = evaluation.index
            if loading:
                self.struck()
        elif state.evaluations.due >= 0:
            for name, order in list(loading.items())[1:]:
                if order not in self._known:
                    self._known.add(order)
                    self.strike(state, state.members.replicas[name])

    def strike(self, state: State, replica: Replica) -> None:
        self.faults.pause(self.world.processes[replica.name], HELD * self.faults.lease_s)


def loads_in_flight(state: State, replica: Replica) -> int:
    """Return the id of the unanswered order to load in flight; 0 if there is none."""
    ordered = state.orders.commands.get(keys.pull_key(replica.name))
    command = ordered.command if ordered is not None else None
    in_flight = isinstance(command, cmd.PullWeights) and command.purpose == PullPurpose.IN_FLIGHT
    return ordered.command_id if ordered is not None and in_flight and replica.running else 0
