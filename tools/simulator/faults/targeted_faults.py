"""Targeted faults: losses and requests at the very moment at which they hurt most.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Effects: a process is lost or slow, a user asks
Gives   TARGETED, by kind of fault; those of relays, versions, migrations, loads, fetches and
        machines are in separate files

Random faults seldom hit a short phase: a third death just when the trainer waits for that response,
a relay that is lost while it is being published to. Each targeted fault waits for its moment and
strikes then, a few times in a run at most. Way and target are drawn from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from laminar.core.scheduling.admission import groups_wanted
from laminar.core.scheduling.groups import list_members
from laminar.core.scheduling.recovery import DEATHS_MAX
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.transitions import IN_ENGINE, UNFINISHED
from laminar.core.state.work import Trajectory
from laminar.core.steps.batching import find_awaited_group, is_trainer_idle
from laminar.events import events as ev
from laminar.names import ids
from tools.simulator.faults.effects import Effects
from tools.simulator.faults.targeted import WAYS, TargetedFault, evaluated, slow_down
from tools.simulator.faults.targeted_handover import (
    CoordinatorInHandover,
    DestinationEnds,
    EvaluationInHandover,
    LostInHandover,
    PoisonInTail,
    RelayInHandover,
    StoreCutInHandover,
)
from tools.simulator.faults.targeted_load import (
    CoordinatorInLoad,
    EvaluationInLoad,
    LostInLoad,
    ProofFails,
    StoreCutInLoad,
)
from tools.simulator.faults.targeted_machine import MachineInPhase
from tools.simulator.faults.targeted_relay import (
    PinLate,
    PublishDiffers,
    RelayHoldsUp,
    RelayInTransfer,
    RelayWhilePublishing,
    TransferNeverEnds,
)
from tools.simulator.faults.targeted_source import (
    CheckpointGone,
    EvaluationElsewhere,
    FetchedTwice,
    SourceLost,
    VersionElsewhere,
)
from tools.simulator.faults.targeted_version import (
    CheckpointOutdated,
    EvaluationOutOfReach,
    EvaluationStalls,
    EvictedVersion,
    NewestCheckpointDamaged,
    OnlyOneOfItsVersion,
)


class LastAnswer(TargetedFault):
    """Loss of the replica that generates the last awaited response, until that is given up.

    Alternatively its reward fails. The trainer, the end of the data or an evaluation may be what
    waits, but never so long that a replica falls silent three times: only the third loss is in the
    drawn way.
    """

    kind = "last-answer-lost"
    share = 1.0  # three moments, five ways and three kinds of work that it may complete

    def __init__(self, faults: Effects, chance: random.Random) -> None:
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
    """Yield the only missing sibling in the group that completes a batch."""
    due = len(state.work.ready) + 1 >= state.settings.groups_per_step or groups_wanted(state) <= 0
    if due and state.run.phase == Phase.RUNNING and is_trainer_idle(state):
        group = find_awaited_group(state)
        missing = _unfinished(state, group.id) if group is not None else []
        if len(missing) == 1 and state.settings.group_size - 1 >= state.settings.min_scored:
            yield missing[0]


def _last_of_data(state: State) -> Iterator[Trajectory]:
    """Yield the unfinished siblings of the last prompt of the data."""
    work = state.work
    if (
        state.run.phase != Phase.RUNNING
        or state.steps.batch is not None
        or state.settings.total_steps
    ):
        return
    if groups_wanted(state) <= 0 and sum(work.deadlines.values()) == len(work.ready) + 1:
        group = find_awaited_group(state)
        if group is not None:
            yield from _unfinished(state, group.id)


def _last_of_evaluation(state: State) -> Iterator[Trajectory]:
    evaluation = state.evaluations.running
    if evaluation is not None and evaluation.done == evaluation.total - 1:
        yield from (t for t in evaluated(state) if t.status in UNFINISHED)


def _unfinished(state: State, group: ids.GroupId) -> list[Trajectory]:
    return [t for t in list_members(state, group) if t.status in UNFINISHED]


class DrainInPhase(TargetedFault):
    """Request of the user to end the run, in a phase in which that is rarely tested.

    The run trains with several versions in use, exports during an evaluation, or makes its final
    evaluation. Half of the time the user asks again, while the last ends are written, to end at
    once.
    """

    kind = "drain-in-phase"
    share = 1.0  # few runs evaluate while they export
    after_healing = True  # a request is not a fault

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._phase = chance.choice(
            (Phase.RUNNING, Phase.FINAL_EVALUATION, *4 * (Phase.EXPORTING,))
        )
        self._asks_again = chance.random() < 0.5
        self._asked = False

    def look(self, state: State) -> None:
        if self._asked:
            self.done = state.run.phase in (Phase.ENDING, Phase.STOPPING, Phase.ENDED)
            if state.run.phase == Phase.ENDING:
                self._ask(at_once=True)
            return
        if self._phase == Phase.EXPORTING:
            self._hold_up(state)
        if state.run.phase == self._phase and self._ripe(state):
            self._asked, self.done = True, not self._asks_again
            self.struck()
            self._ask(at_once=False)

    def _ask(self, *, at_once: bool) -> None:
        self.world.coordinator.report(ev.DrainRequested(reason="SIGINT", at_once=at_once))

    def _ripe(self, state: State) -> bool:
        if self._phase != Phase.RUNNING:
            return state.evaluations.running is not None
        if self.now < self.from_ns or state.steps.batch is None:
            return False
        return any(0 <= r.version < state.versions.newest for r in state.members.replicas.values())

    def _hold_up(self, state: State) -> None:
        """Slow the evaluation of the last batches down, so that it still runs during the export."""
        near = groups_wanted(state) <= 2 * state.settings.groups_per_step
        if near and state.evaluations.running is not None and not self.faults.healed:
            slow_down(self.faults, state, state.evaluations.running.version)


TARGETED: dict[str, type[TargetedFault]] = {
    fault.kind: fault
    for fault in (
        LastAnswer, RelayWhilePublishing, RelayInTransfer, RelayHoldsUp, TransferNeverEnds,
        DrainInPhase, PublishDiffers, PinLate, EvaluationOutOfReach, OnlyOneOfItsVersion,
        EvictedVersion, CheckpointOutdated, EvaluationStalls, LostInHandover,
        DestinationEnds, CoordinatorInHandover, StoreCutInHandover, RelayInHandover,
        EvaluationInHandover, PoisonInTail, MachineInPhase, NewestCheckpointDamaged, LostInLoad,
        ProofFails, StoreCutInLoad, CoordinatorInLoad, EvaluationInLoad,
        VersionElsewhere, SourceLost, FetchedTwice, CheckpointGone, EvaluationElsewhere,
    )
}  # fmt: skip
