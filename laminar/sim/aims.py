"""Aimed faults: losses and requests at the very moment at which they hurt most.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Faults: a process is lost or slow, a user asks
Gives   AIMS, by kind of fault; those of relays are in relay_aims.py

What strikes at random times seldom meets a short phase: a third death just when the trainer waits
for that answer, a relay that is lost while it is being published to. An aim waits for its moment
and strikes then, a few times in a run at most. Way and target are drawn from the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from laminar import ids
from laminar.core.admission import groups_wanted
from laminar.core.buffering import awaited, trainer_idle
from laminar.core.recovery import DEATHS_MAX
from laminar.core.siblings import members
from laminar.core.state import (
    EXPORTING,
    FINAL_EVALUATION,
    RUNNING,
    Replica,
    State,
    Trajectory,
)
from laminar.core.transitions import GENERATED, IN_ENGINE, UNFINISHED
from laminar.events import events as ev
from laminar.sim.aim import (
    HELD,
    SLOW,
    WAYS,
    Aim,
    evaluated,
    hold_up_evaluation,
    slow_down,
)
from laminar.sim.process import SimProcess
from laminar.sim.relay_aims import (
    PinLate,
    PublishDiffers,
    RelayHoldsUp,
    RelayInTransfer,
    RelayWhilePublishing,
)
from laminar.sim.scenario import seconds
from laminar.sim.scheduler import MS

if TYPE_CHECKING:
    from laminar.sim.faults import Faults

SLOW_REWARDS = 5.0
LOSS_HEARD_NS = 50 * MS
"""By then the coordinator mostly knows that a process died."""


class LastAnswer(Aim):
    """Whoever generates the one answer that is waited for is lost, until that is given up; or it
    cannot be rewarded.

    The trainer, the end of the data or an evaluation may be what waits. Nobody waits for so long
    that a replica falls silent three times: only the third loss is in the drawn way.
    """

    kind = "last-answer-lost"
    share = 1.0  # three moments, five ways and three kinds of work that it may complete

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        moments = (_last_of_batch, _last_of_data, _last_of_evaluation)
        self._moments = chance.sample(moments, len(moments))
        self._unscored = chance.random() < 0.3
        self._losses = 0
        self._placed: tuple[str, int] = ("", 0)

    def look(self, state: State) -> None:
        if self.now < self.from_ns:
            return
        found = next((t for moment in self._moments for t in moment(state)), None)
        if found is None or found.status not in IN_ENGINE:
            return
        if (found.id, found.placement) != self._placed:
            self._placed = found.id, found.placement
            self._losses += 1
            self.done = self._losses >= 3 * DEATHS_MAX
            self.struck()
            last = max(found.deaths, found.attempt - 1) >= DEATHS_MAX - 1
            if self._unscored:
                self.faults.unscorable.add(found.id)
            else:
                self.lose(found.replica, self.chance.choice(WAYS) if last else "dies")


def _last_of_batch(state: State) -> Iterator[Trajectory]:
    """The only sibling that is missing in the group that completes a batch."""
    due = len(state.ready) + 1 >= state.settings.groups_per_step or groups_wanted(state) <= 0
    if due and state.phase == RUNNING and trainer_idle(state):
        group = awaited(state)
        missing = _unfinished(state, group.id) if group is not None else []
        if len(missing) == 1 and state.settings.group_size - 1 >= state.settings.min_scored:
            yield missing[0]


def _last_of_data(state: State) -> Iterator[Trajectory]:
    """A sibling of the only prompt that is unfinished when there are no others."""
    if state.phase != RUNNING or state.batch is not None or state.settings.total_steps:
        return
    if groups_wanted(state) <= 0 and sum(state.deadlines.values()) == len(state.ready) + 1:
        group = awaited(state)
        if group is not None:
            yield from _unfinished(state, group.id)


def _last_of_evaluation(state: State) -> Iterator[Trajectory]:
    evaluation = state.evaluation
    if evaluation is not None and evaluation.done == evaluation.total - 1:
        yield from (t for t in evaluated(state) if t.status in UNFINISHED)


def _unfinished(state: State, group: ids.GroupId) -> list[Trajectory]:
    return [t for t in members(state, group) if t.status in UNFINISHED]


class DrainInPhase(Aim):
    """The user asks a run to end that trains and has several versions in use, or that is about to
    end anyway: that exports during an evaluation, or evaluates for the last time."""

    kind = "drain-in-phase"
    share = 1.0  # few runs evaluate while they export
    after_healing = True  # a request is no fault

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._phase = chance.choice((RUNNING, FINAL_EVALUATION, *4 * (EXPORTING,)))

    def look(self, state: State) -> None:
        if self._phase == EXPORTING:
            self._hold_up(state)
        if state.phase == self._phase and self._ripe(state):
            self.done = True
            self.struck()
            self.world.coordinator.report(ev.DrainRequested(reason="SIGINT"))

    def _ripe(self, state: State) -> bool:
        if self._phase != RUNNING:
            return state.evaluation is not None
        if self.now < self.from_ns or state.batch is None:
            return False
        return any(0 <= r.version < state.newest for r in state.replicas.values())

    def _hold_up(self, state: State) -> None:
        """What evaluates while the last batches are made is still at it when the run exports."""
        near = groups_wanted(state) <= 2 * state.settings.groups_per_step
        if near and state.evaluation is not None and not self.faults.healed:
            slow_down(self.faults, state, state.evaluation.version)


class EvaluationOutOfReach(Aim):
    """A machine's relay and replicas start afresh during an evaluation of an older version, while
    rewards take long; when they are back, and until they have weights, all replicas elsewhere are
    lost, or when the relay has them and its replicas are late; half of the time the checkpoints
    are gone, too."""

    kind = "evaluation-out-of-reach"
    share = 1.0  # few runs have several machines and such an evaluation

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._relay = ""
        self._struck = False
        self._removes, self._late = chance.random() < 0.5, chance.random() < 0.5

    def look(self, state: State) -> None:
        evaluation = state.evaluation
        if evaluation is None or len(state.relays) < 2:
            self.done = self._struck
        elif evaluation.version >= state.newest:
            hold_up_evaluation(self.faults, state)
        elif not self._relay:
            self._relay = state.chain[-1]
            self.faults.reward_slow = SLOW_REWARDS
            for process in self._machine(state):
                self.lose(process.name, "dies")
        elif self._relay in state.relays:
            has_weights = state.relays[self._relay].newest >= 0
            here = any(r.relay == self._relay for r in state.live_replicas())
            self.done = here if self._late else has_weights
            if self.done:
                return
            if self._late:
                self._hold_replicas(state, has_weights)
            elif here:
                self._strike(state)

    def _machine(self, state: State) -> list[SimProcess]:
        return self.world.children_of(state.relays[self._relay].node)

    def _hold_replicas(self, state: State, has_weights: bool) -> None:
        """They stand still until the relay has weights and an answer waits for a reward."""
        held = [process for process in self._machine(state) if process.role == "rollout"]
        for process in held:
            if process.alive and not process.paused:
                self.faults.pause(process, HELD * self.faults.lease_s)
        if has_weights and _waits_for_reward(state):
            self.done = True
            self._strike(state)
            for process in held:
                self.world.scheduler.after(LOSS_HEARD_NS, process.resume)

    def _strike(self, state: State) -> None:
        self._struck = True
        self.struck()
        if self._removes:
            self.world.checkpoints.clear()
        for replica in state.live_replicas():
            if replica.relay != self._relay:
                self.lose(replica.name, "dies")


class OnlyOneOfItsVersion(Aim):
    """The only replica of a version is lost with its work while another one is empty."""

    kind = "only-one-of-its-version-lost"

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._ways = chance.sample(WAYS, 3)

    def look(self, state: State) -> None:
        if self.now < self.from_ns or state.phase != RUNNING:
            return
        replicas = state.replicas.values()
        idle = [r for r in replicas if not r.running and not r.loading and r.version >= 0]
        if not idle:
            return
        versions = Counter(r.version for r in replicas)
        in_reach = {version for r in idle for version in state.held_for(r)}
        for replica in replicas:
            if replica.running and versions[replica.version] == 1 and replica.version in in_reach:
                self.from_ns = self.now + seconds(2 * self.faults.lease_s)
                self.struck()
                self.lose(replica.name, self._ways.pop())
                self.done = not self._ways
                return


class EvictedVersion(Aim):
    """A replica is slow with an older version, half of the time an evaluation's, when all relays
    die, which come back with the newest alone; then it is lost with its work, or all replicas are;
    half of the time the checkpoints are gone, too."""

    kind = "evicted-version-lost"
    share = 1.0  # few runs keep checkpoints

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._victim: tuple[str, int] = ("", -1)  #: a replica and its version
        self._removes, self._all = chance.random() < 0.5, chance.random() < 0.5
        self._evaluates = chance.random() < 0.5
        if self._evaluates:
            self._removes = self._all = True  # then its open answers have nowhere to go
        self._tries = 3

    def look(self, state: State) -> None:
        if self.now < self.from_ns or state.phase != RUNNING:
            return
        name, version = self._victim
        replica = state.replicas.get(name)
        if replica is None or not replica.running or replica.version != version:
            self._begin(state)
        elif state.master() is None or version in state.lookup.held:
            return
        elif _ripe(state, version):
            self.done = True
            self.struck()
            if self._removes:
                self.world.checkpoints.clear()
            for victim in list(state.replicas) if self._all else [name]:
                self.lose(victim)

    def _begin(self, state: State) -> None:
        candidates = self._candidates(state)
        if candidates and self._evaluates:
            hold_up_evaluation(self.faults, state)
        victim = next((r for r in candidates if r.version < state.newest), None)
        if victim is None or not state.chain:
            return
        self._victim = victim.name, victim.version
        self._tries -= 1
        self.done = not self._tries
        self.faults.reward_slow = SLOW_REWARDS
        self.faults.speed(self.world.processes[victim.name], SLOW)
        for relay in list(state.chain):
            self.lose(relay, "dies")

    def _candidates(self, state: State) -> list[Replica]:
        """Those who work with a version that has a checkpoint, perhaps that of an evaluation."""
        working = [r for r in state.replicas.values() if r.running and r.version in state.saved]
        if not self._evaluates or not state.num_eval:
            return working
        evaluated_version = state.evaluation.version if state.evaluation is not None else -1
        return [r for r in working if r.version == evaluated_version]


def _ripe(state: State, version: int) -> bool:
    """An evaluation of this version, if there is one, has an answer that waits for its reward and
    one that is generated."""
    if state.evaluation is None or state.evaluation.version != version:
        return True
    generated = any(trajectory.status in IN_ENGINE for trajectory in evaluated(state))
    return generated and _waits_for_reward(state)


def _waits_for_reward(state: State) -> bool:
    """An answer of the evaluation does."""
    return any(trajectory.status == GENERATED for trajectory in evaluated(state))


AIMS: dict[str, type[Aim]] = {
    aim.kind: aim
    for aim in (
        LastAnswer, RelayWhilePublishing, RelayInTransfer, RelayHoldsUp, DrainInPhase,
        PublishDiffers, PinLate, EvaluationOutOfReach, OnlyOneOfItsVersion, EvictedVersion,
    )
}  # fmt: skip
