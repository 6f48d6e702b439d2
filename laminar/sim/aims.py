"""Aimed faults: losses and requests at the very moment at which they hurt most.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Faults: a process is lost or slow, a link is cut, a user asks
Gives   AIMS, by kind of fault

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
from laminar.core.buffering import awaited, batch_size, trainer_idle
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
from laminar.events.base import COORDINATOR
from laminar.sim.aim import (
    SILENCE,
    SLOW,
    WAYS,
    Aim,
    evaluated,
    hold_up_evaluation,
    slow_down,
)
from laminar.sim.models.relay import Relay
from laminar.sim.process import SimProcess
from laminar.sim.scenario import seconds
from laminar.sim.scheduler import MS

if TYPE_CHECKING:
    from laminar.sim.faults import Faults

SLOW_REWARDS = 5.0
SLOW_HOP = 50.0
"""Enough that it holds up a transfer by more than what passes for noise (core/relays.py)."""
LOSS_HEARD_NS = 50 * MS
"""By then the coordinator mostly knows that a process died."""
HELD = 0.8
"""Part of its lease for which a process may stand still without being lost."""


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


class RelayWhilePublishing(Aim):
    """The relay of the trainer's machine is lost, comes back, and is lost once more with the
    publish that it is owed, when a batch is due meanwhile or the run is at its end."""

    kind = "relay-lost-publishing"
    share = 1.0  # three moments, five ways

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._drains = chance.random() < 0.25
        self._lost_before = False
        self._held_ns = 0

    def look(self, state: State) -> None:
        if state.phase not in (RUNNING, EXPORTING) or self.now < self.from_ns:
            return
        if "publish" in state.commands:
            self._hold(state)
        elif self._held_ns:
            self.done = True  # it was lost by another fault
        elif not self._lost_before and self._ripe(state):
            self._lost_before = True
            self.lose("relay-0", "dies")

    def _ripe(self, state: State) -> bool:
        """There will be another batch before the relay is back, and one after it."""
        under_way = sum(state.deadlines.values()) >= 2 * state.settings.groups_per_step
        return trainer_idle(state) and state.master() is not None and (under_way or self._drains)

    def _hold(self, state: State) -> None:
        """It stands still until somebody waits for the trainer."""
        lease_ns = seconds(self.faults.lease_s)
        if not self._held_ns:
            self._held_ns = self.now
            self.struck()
            self.faults.pause(self.world.processes["relay-0"], SILENCE * self.faults.lease_s)
        elif self._drains:
            self._drains = False
            self.world.coordinator.report(ev.DrainRequested(reason="SIGINT"))
        elif self.way == "silent":
            self.done = state.master() is None
        elif batch_size(state) or state.phase == EXPORTING or self._held_for(HELD * lease_ns):
            self.done = True
            self.lose("relay-0")

    def _held_for(self, duration_ns: float) -> bool:
        return self.now - self._held_ns > duration_ns


class RelayInTransfer(Aim):
    """A relay is lost while a version passes along the chain."""

    kind = "relay-lost-in-transfer"

    def look(self, state: State) -> None:
        if self.now < self.from_ns or len(state.chain) < 2 or state.phase != RUNNING:
            return
        behind = [r.name for r in state.relays.values() if r.newest < state.newest]
        if behind:
            self.done = True
            self.struck()
            self.lose(self.chance.choice([*state.chain, *behind]))


class RelayHoldsUp(Aim):
    """A relay in the middle of the chain is slow until it is the last one, whatever else may end
    its slowness."""

    kind = "relay-holds-up-transfers"
    share = 1.0  # few runs have so many machines

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._relay = ""

    def look(self, state: State) -> None:
        if not self._relay:
            between = state.chain[2:-1]  # whom others than the head feed
            if not between or state.phase != RUNNING:
                return
            self._relay = self.chance.choice(between)
            self.struck()
        self.done = self._relay not in state.relays or self._relay == state.chain[-1]
        process = self.world.processes[self._relay]
        self.faults.speed(process, 1.0 if self.done else SLOW_HOP)


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


class PublishDiffers(Aim):
    """The relay of the trainer's machine is lost, with another one half of the time, and what the
    trainer hands over again has other bytes under the same number."""

    kind = "publish-differs"

    def look(self, state: State) -> None:
        if self.now >= self.from_ns and state.phase == RUNNING and state.newest > 0:
            self.done = True
            self.struck()
            self.faults.differs_next = True
            self.lose("relay-0", "dies")
            others = [name for name in state.chain if name != "relay-0"]
            if others and self.chance.random() < 0.5:
                self.lose(self.chance.choice(others), "dies")


class PinLate(Aim):
    """No relay hears that the version of an evaluation is to be kept, and whoever runs it is slow.
    All of them are lost when the version is gone and the coordinator does not know it."""

    kind = "pin-late"
    share = 1.0  # few evaluations last so long

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._cut = False
        self._slow = False

    def look(self, state: State) -> None:
        evaluation = state.evaluation
        if evaluation is None:
            if state.evaluation_due >= 0 and not self._cut:
                self._cut = True
                for name in state.relays:
                    duration_s = self.chance.uniform(1, 3) * self.faults.lease_s
                    self.faults.cut(COORDINATOR, name, duration_s)
            self.done = self._slow
        elif self._cut:
            if not self._slow:
                self._slow = True
                slow_down(self.faults, state, evaluation.version)
            believed = [r for r in state.relays.values() if evaluation.version in r.held]
            if believed and not any(self._holds(r.name, evaluation.version) for r in believed):
                self.done = True
                self.struck()
                for replica in list(state.replicas.values()):
                    if replica.version == evaluation.version:
                        self.lose(replica.name, "dies")

    def _holds(self, relay: str, version: int) -> bool:
        process = self.world.processes[relay]
        model = process.model
        assert isinstance(model, Relay)
        return process.welcomed and version in model.slots.versions_held


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
