"""Targeted faults of relays: one is lost, slow or misses a message at the moment that hurts most.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Effects: a process is lost or slow, a link is cut, a user asks
Gives   the faults of that kind, for TARGETED (targeted_faults.py)
"""

from __future__ import annotations

import random

from laminar.core.state import keys
from laminar.core.state.indexes import master_relay
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.steps.batching import batch_size, is_trainer_idle
from laminar.core.versions.broadcast import RECEIVE_TIMEOUT_MS
from laminar.events import events as ev
from laminar.events.base import COORDINATOR
from tools.simulator.faults.effects import Effects
from tools.simulator.faults.targeted import HELD, SILENCE, SLOW_REWARDS, TargetedFault, slow_down
from tools.simulator.scenario import seconds

SLOW_HOP = 50.0
"""Slowness that delays a transfer by more than passes for noise (core/versions/broadcast.py)."""


class RelayWhilePublishing(TargetedFault):
    """Two losses of the trainer's relay, the second together with the publish that it is due.

    The second loss comes when a batch is due meanwhile or the run is at its end.
    """

    kind = "relay-lost-publishing"
    share = 1.0  # three moments, five ways

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._drains = chance.random() < 0.25
        self._lost_before = False
        self._held_ns = 0

    def look(self, state: State) -> None:
        if state.run.phase not in (Phase.RUNNING, Phase.EXPORTING) or self.now < self.from_ns:
            return
        if keys.PUBLISH in state.orders.commands:
            self._hold(state)
        elif self._held_ns:
            self.done = True  # another fault has lost it
        elif not self._lost_before and self._ripe(state):
            self._lost_before = True
            self.lose("relay-0", "dies")

    def _ripe(self, state: State) -> bool:
        """Return whether another batch comes before the relay is back, and one after it."""
        under_way = sum(state.work.deadlines.values()) >= 2 * state.settings.groups_per_step
        return (
            is_trainer_idle(state)
            and master_relay(state) is not None
            and (under_way or self._drains)
        )

    def _hold(self, state: State) -> None:
        """Hold the publish up until something waits for it, then lose the relay."""
        lease_ns = seconds(self.faults.lease_s)
        if not self._held_ns:
            self._held_ns = self.now
            self.struck()
            self.faults.pause(self.world.processes["relay-0"], SILENCE * self.faults.lease_s)
        elif self._drains:
            self._drains = False
            self.world.coordinator.report(ev.DrainRequested(reason="SIGINT"))
        elif self.way == "silent":
            self.done = master_relay(state) is None
        elif (
            batch_size(state)
            or state.run.phase == Phase.EXPORTING
            or self._held_for(HELD * lease_ns)
        ):
            self.done = True
            self.lose("relay-0")

    def _held_for(self, duration_ns: float) -> bool:
        return self.now - self._held_ns > duration_ns


class RelayInTransfer(TargetedFault):
    """Loss of a relay while a version passes along the chain."""

    kind = "relay-lost-in-transfer"

    def look(self, state: State) -> None:
        if (
            self.now < self.from_ns
            or len(state.members.relay_chain) < 2
            or state.run.phase != Phase.RUNNING
        ):
            return
        behind = [r.name for r in state.members.relays.values() if r.newest < state.versions.newest]
        if behind:
            self.done = True
            self.struck()
            self.lose(self.chance.choice([*state.members.relay_chain, *behind]))


class RelayHoldsUp(TargetedFault):
    """Slow relay in the middle of the chain, until it is the last one or lost."""

    kind = "relay-holds-up-transfers"
    share = 1.0  # few runs have so many machines

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._relay = ""

    def look(self, state: State) -> None:
        if not self._relay:
            between = state.members.relay_chain[2:-1]  # relays not fed by the head
            if not between or state.run.phase != Phase.RUNNING:
                return
            self._relay = self.chance.choice(between)
            self.struck()
        self.done = (
            self._relay not in state.members.relays or self._relay == state.members.relay_chain[-1]
        )
        process = self.world.processes[self._relay]
        self.faults.speed(process, 1.0 if self.done else SLOW_HOP)


class TransferNeverEnds(TargetedFault):
    """Relay that sends its successor nothing more, while the trainer's next step is long.

    The step outlasts the timeout of the transfer: else the run would end before that.
    """

    kind = "transfer-never-ends"
    share = 0.3

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._asked = False

    def look(self, state: State) -> None:
        if not self._asked:
            ripe = state.run.phase == Phase.RUNNING and len(state.members.relay_chain) > 1
            self._asked = self.faults.sticks_next = ripe and self.now >= self.from_ns
        elif not self.faults.sticks_next:
            self.done = True
            self.struck()
            self.faults.step_longer_s = 1.5 * RECEIVE_TIMEOUT_MS / 1000


class PublishDiffers(TargetedFault):
    """Loss of the trainer's relay, after which the trainer publishes other bytes as that version.

    Half of the time another relay is lost as well.
    """

    kind = "publish-differs"

    def look(self, state: State) -> None:
        if (
            self.now >= self.from_ns
            and state.run.phase == Phase.RUNNING
            and state.versions.newest > 0
        ):
            self.done = True
            self.struck()
            self.faults.differs_next = True
            self.lose("relay-0", "dies")
            others = [name for name in state.members.relay_chain if name != "relay-0"]
            if others and self.chance.random() < 0.5:
                self.lose(self.chance.choice(others), "dies")


class PinLate(TargetedFault):
    """Order to pin an evaluation's version that reaches no relay.

    The replica that runs the evaluation is slow, as rewards are. All such replicas are lost when
    the version is gone and the coordinator does not know it.
    """

    kind = "pin-late"
    share = 1.0  # few evaluations last so long

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._cut = False
        self._slow = False
        self._tries = 3

    def look(self, state: State) -> None:
        evaluation = state.evaluations.running
        if evaluation is None:
            if self._slow:
                self._try_again()
            elif state.evaluations.due >= 0 and not self._cut:
                self._cut_relays(state)
        elif self._cut:
            if not self._slow:
                self._slow = True
                slow_down(self.faults, state, evaluation.version)
                self.faults.reward_slow = SLOW_REWARDS
            believed = [r for r in state.members.relays.values() if evaluation.version in r.held]
            if believed and not any(self._holds(r.name, evaluation.version) for r in believed):
                self.struck()
                for replica in list(state.members.replicas.values()):
                    if replica.version == evaluation.version:
                        self.lose(replica.name, "dies")
                self._try_again()

    def _cut_relays(self, state: State) -> None:
        self._cut = True
        for name in state.members.relays:
            duration_s = self.chance.uniform(1, 3) * self.faults.lease_s
            self.faults.cut(COORDINATOR, name, duration_s)

    def _try_again(self) -> None:
        """Try again with the next evaluation."""
        self._cut = self._slow = False
        self._tries -= 1
        self.done = not self._tries

    def _holds(self, relay: str, version: int) -> bool:
        held = self.world.machine_of(relay).versions.get_complete_digests()
        return self.world.processes[relay].welcomed and version in held
