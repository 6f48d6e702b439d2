"""Targeted faults of fetches: only another machine has the version that lost work needs.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Effects: processes are lost or slow, checkpoints are gone
Gives   the faults of that kind, for TARGETED (targeted_faults.py)

Random faults seldom cause a fetch: the last copy must be on a machine without a free replica, while
another one has a free replica and newer versions only. These faults are drawn only where a menu
asks for them, since they take runs of several machines.
"""

from __future__ import annotations

import random

from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events.reasons import PullPurpose
from laminar.names.ids import Purpose
from tools.simulator.faults.effects import Effects
from tools.simulator.faults.targeted import SLOW, TargetedFault
from tools.simulator.scenario import seconds

TRIES = 3


class VersionElsewhere(TargetedFault):
    """Loss of all replicas with an older version that only one other machine still has.

    A replica is slow with that version while all other machines' relays die and come back with
    newer versions only; then all replicas of its machine or version are lost.
    """

    kind = "version-elsewhere"
    share = 0.0  # only where a menu asks for it

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self.victim, self.relay, self.version = "", "", -1
        self._tries = TRIES
        self._until_ns = 0  #: timeout of the fetch; 0: nothing is lost yet

    def follow(self, state: State, order: cmd.PullWeights) -> bool:
        """Return whether this load of the version for the lost work was the moment to strike."""
        return True

    def look(self, state: State) -> None:
        if self.now < self.from_ns or state.run.phase != Phase.RUNNING:
            return
        if self._until_ns:
            self._wait(state)
        elif not self._works(state):
            self._begin(state)
        elif list(indexes_of(state).held.get(self.version, {})) == [self.relay] and any(
            relay.newest > self.version for relay in state.members.relays.values()
        ):
            self._lose_replicas(state)

    def _works(self, state: State) -> bool:
        replica = state.members.replicas.get(self.victim)
        return replica is not None and bool(replica.running) and replica.version == self.version

    def _begin(self, state: State) -> None:
        found = next((r for r in state.members.replicas.values() if self._suits(state, r)), None)
        if found is None or len(state.members.relays) < 2:
            return
        self.victim, self.relay, self.version = found.name, found.relay, found.version
        self._tries -= 1
        self.done = self._tries < 0
        self.faults.speed(self.world.processes[found.name], SLOW)
        for name in list(state.members.relay_chain):
            if name != found.relay:
                self.lose(name, "dies")

    def _suits(self, state: State, replica: Replica) -> bool:
        older = 0 <= replica.version < state.versions.newest
        return (
            older
            and bool(replica.running)
            and replica.version in state.members.list_held_versions(replica)
        )

    def _lose_replicas(self, state: State) -> None:
        self._until_ns = self.now + seconds(2 * self.faults.lease_s)
        for replica in list(state.members.replicas.values()):
            if replica.relay == self.relay or replica.version == self.version:
                self.lose(replica.name)

    def _wait(self, state: State) -> None:
        for outstanding in list(state.orders.commands.values()):
            order = outstanding.command
            if not isinstance(order, cmd.PullWeights) or order.version != self.version:
                continue
            if (order.holder or order.checkpoint) and self.follow(state, order):
                self.done = True
                return self.struck()
        if self.now >= self._until_ns:
            self._until_ns, self.victim = 0, ""


class SourceLost(VersionElsewhere):
    """Loss of the relay that the version is fetched from."""

    kind = "source-lost-in-fetch"

    def follow(self, state: State, order: cmd.PullWeights) -> bool:
        if order.holder:
            self.lose(order.holder)
        return bool(order.holder)


class FetchedTwice(VersionElsewhere):
    """Loss of the replica that waits for the version, so that another one asks for it."""

    kind = "fetched-twice"

    def follow(self, state: State, order: cmd.PullWeights) -> bool:
        if order.holder:
            self.lose(order.to)
        return bool(order.holder)


class CheckpointGone(VersionElsewhere):
    """Loss of relay and checkpoints when the version is about to be loaded from either."""

    kind = "checkpoint-gone-in-fetch"

    def follow(self, state: State, order: cmd.PullWeights) -> bool:
        if self.version not in state.versions.checkpoint_paths:
            return False
        self.world.lose_checkpoints()
        self.lose(self.relay, "dies")
        return True


class EvaluationElsewhere(VersionElsewhere):
    """Loss of evaluation samples only, of a version that is not the newest."""

    kind = "evaluation-elsewhere"

    def _suits(self, state: State, replica: Replica) -> bool:
        groups = (state.work.groups[state.work.trajectories[t].group] for t in replica.running)
        held_out = all(group.purpose == Purpose.EVAL for group in groups)
        return held_out and super()._suits(state, replica)

    def follow(self, state: State, order: cmd.PullWeights) -> bool:
        return order.purpose == PullPurpose.EVALUATION and bool(order.holder)
