"""Targeted faults of migrations: a participant is lost, late or cut off, or an event comes between.

Reads   which replicas migrate trajectories away
Gives   the faults of that kind, for TARGETED (targeted_faults.py)
"""

from __future__ import annotations

import random
from abc import abstractmethod

from laminar.core.state import keys
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from tools.simulator.faults.effects import EVERYBODY, Effects
from tools.simulator.faults.targeted import HELD, TargetedFault, evaluated, hold_up_evaluation

STRIKES_MAX = 3
STORE = "store-0"
WAY_TO_THE_STORE = 4.0  #: message delays from an order to release until the store has answered
HURRY = 0.02  #: slowness of a replica that is to be empty soon


class HandoverFault(TargetedFault):
    """Fault that looks for a replica that migrates trajectories away; strikes a few times."""

    share = 1.0  # many runs migrate nothing

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._strikes = 0

    def look(self, state: State) -> None:
        if self.now < self.from_ns or not state.settings.repack_policy:
            return
        for replica in state.members.replicas.values():
            if replica.outgoing and self.is_due(state, replica):
                return self.strike(state, replica)

    @abstractmethod
    def is_due(self, state: State, source: Replica) -> bool:
        """Return whether it is time to strike."""

    @abstractmethod
    def strike(self, state: State, source: Replica) -> None:
        """Strike once."""

    def struck(self) -> None:
        super().struck()
        self._strikes += 1
        self.done = self._strikes >= STRIKES_MAX

    def soon(self) -> float:
        """Return random seconds, at most until the store has what is migrated."""
        return self.chance.uniform(0, WAY_TO_THE_STORE) * self.world.scenario.world.delay_ms / 1000


class LostInHandover(HandoverFault):
    """Loss of the source or destination of a migration, or a late answer of the source.

    It comes before the source has reported that the store has everything, or later, before the
    destination has reported anything.
    """

    kind = "lost-in-hand-over"

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._released = chance.random() < 0.4
        self._whom = chance.choice(("source", "destination", "late"))
        self._in_flush = chance.random() < 0.5  # else before the source gets the order

    def is_due(self, state: State, source: Replica) -> bool:
        return self._released == _has_released(state, source)

    def strike(self, state: State, source: Replica) -> None:
        self.struck()
        destination = _destination(state, source)
        if self._whom == "late":
            process = self.world.processes[source.name]
            self.faults.pause(process, HELD * self.faults.lease_of_s(process.role))
            return
        name = source.name if self._whom == "source" or not destination else destination
        if self._in_flush:
            self.faults.later(self.soon(), self._lose_later, name)
        else:
            self.lose(name)

    def _lose_later(self, name: str) -> None:
        if not self.faults.healed:
            self.lose(name)


class DestinationEnds(HandoverFault):
    """Migration to a replica whose other work ends first: it must not count as empty."""

    kind = "destination-ends-first"

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._held = 0  #: order to release that is slowed down

    def is_due(self, state: State, source: Replica) -> bool:
        return not _has_released(state, source)

    def strike(self, state: State, source: Replica) -> None:
        destination = state.members.replicas.get(_destination(state, source))
        if destination is None:
            return
        order = state.orders.commands[keys.release_key(source.name)].command_id
        process = self.world.processes[destination.name]
        if order != self._held:
            self._held = order
            self.faults.speed(process, HURRY)
            release_s = state.settings.repack_release_timeout_ms / 1000
            self.faults.pause(self.world.processes[source.name], HELD * release_s)
        elif not destination.running and process.slow == HURRY:
            self.struck()
            self.faults.speed(process, 1.0)


class CoordinatorInHandover(HandoverFault):
    """Kill of the coordinator between the placement of released work and its start elsewhere."""

    kind = "coordinator-killed-in-hand-over"

    def is_due(self, state: State, source: Replica) -> bool:
        return _has_released(state, source)

    def strike(self, state: State, source: Replica) -> None:
        self.struck()
        self.faults.later(self.soon(), self._kill)

    def _kill(self) -> None:
        if not self.faults.healed:
            self.faults.harm(EVERYBODY)
            self.world.coordinator.kill()


class StoreCutInHandover(HandoverFault):
    """Cut between source and store during the flush, for around its time limit or for longer."""

    kind = "store-cut-in-hand-over"

    def is_due(self, state: State, source: Replica) -> bool:
        cut = self.world.network.link(source.name, STORE).blocked
        return not cut and not _has_released(state, source)

    def strike(self, state: State, source: Replica) -> None:
        self.struck()
        release_s = state.settings.repack_release_timeout_ms / 1000
        duration_s = release_s * self.chance.choice((0.5, 1.5, 5.0))
        self.faults.cut(source.name, STORE, duration_s)
        if self.chance.random() < 0.5:
            self.faults.cut(STORE, source.name, duration_s)


class RelayInHandover(HandoverFault):
    """Loss of the source's relay while the source is emptied: it cannot load its new weights."""

    kind = "relay-lost-in-hand-over"

    def is_due(self, state: State, source: Replica) -> bool:
        return source.relay in state.members.relays

    def strike(self, state: State, source: Replica) -> None:
        self.struck()
        self.lose(source.relay)


class EvaluationInHandover(HandoverFault):
    """Evaluation that begins on the version of what is migrated.

    The evaluation before it lasts until then, and the source is slow to release.
    """

    kind = "evaluation-in-hand-over"

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._known = -1  #: index of the evaluation that is slowed down
        self._held = 0  #: order to release that is slowed down

    def look(self, state: State) -> None:
        if state.evaluations.running is not None and not any(
            r.outgoing for r in state.members.replicas.values()
        ):
            self._known = state.evaluations.running.index
            hold_up_evaluation(self.faults, state)
        super().look(state)

    def is_due(self, state: State, source: Replica) -> bool:
        evaluation = state.evaluations.running
        if evaluation is not None and evaluation.index != self._known:
            return evaluation.version == source.version
        waits = 0 <= state.evaluations.due <= source.version
        return waits and not _has_released(state, source)

    def strike(self, state: State, source: Replica) -> None:
        evaluation = state.evaluations.running
        if evaluation is not None and evaluation.index != self._known:
            self._known = evaluation.index
            return self.struck()
        order = state.orders.commands[keys.release_key(source.name)].command_id
        if order != self._held:
            self._held = order
            release_s = state.settings.repack_release_timeout_ms / 1000
            self.faults.pause(self.world.processes[source.name], HELD * release_s)
            for trajectory in evaluated(state):
                self.faults.speed(self.world.processes[trajectory.replica], HURRY)


class PoisonInTail(HandoverFault):
    """Migrated straggler that kills its destination and every later replica.

    It must be quarantined; what ran next to it is not packed with it again.
    """

    kind = "poison-in-tail"

    def is_due(self, state: State, source: Replica) -> bool:
        may = self.faults.may_poison and not self.faults.poison
        return may and not _has_released(state, source)

    def strike(self, state: State, source: Replica) -> None:
        self.struck()
        given = state.work.trajectories[next(iter(source.outgoing))]
        self.faults.poison = (state.work.groups[given.group].row_index,)
        self.done = True


def _has_released(state: State, source: Replica) -> bool:
    """Return whether the source has released its trajectories, or its time to do so is over."""
    return keys.release_key(source.name) not in state.orders.commands


def _destination(state: State, source: Replica) -> str:
    """Return the destination of the first trajectory that migrates; empty if unknown by now."""
    given = next(iter(source.outgoing))
    return state.repack.progress[given].destination or state.work.trajectories[given].replica
