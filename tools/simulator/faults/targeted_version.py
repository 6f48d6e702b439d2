"""Targeted faults of versions: the last copies of an older one go while work needs them.

Reads   the coordinator's state after each of its turns, the seed
Writes  the world, through Effects: processes are lost, slow or stalled, checkpoints are removed or
        damaged
Gives   the faults of that kind, for TARGETED (targeted_faults.py)
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter

from laminar.core.state.indexes import indexes_of, master_relay
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase, TrajectoryStatus
from laminar.core.state.transitions import IN_ENGINE
from tools.simulator.faults.effects import Effects
from tools.simulator.faults.targeted import (
    HELD,
    SLOW,
    SLOW_REWARDS,
    WAYS,
    TargetedFault,
    evaluated,
    hold_up_evaluation,
)
from tools.simulator.runtime.boot import RUN_DIR
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds
from tools.simulator.scheduler import MS

LOSS_HEARD_NS = 50 * MS  #: time by which the coordinator mostly knows that a process died


class EvaluationOutOfReach(TargetedFault):
    """Loss of all replicas that can reach the version of an evaluation, while rewards are slow.

    One machine's relay and replicas restart during the evaluation of an older version. All replicas
    elsewhere are lost before that machine has weights again, or when its relay has them and its
    replicas are late. Half of the time the checkpoints are gone, too.
    """

    kind = "evaluation-out-of-reach"
    share = 1.0  # few runs have several machines and such an evaluation

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._relay = ""
        self._struck = False
        self._removes, self._late = chance.random() < 0.5, chance.random() < 0.5

    def look(self, state: State) -> None:
        evaluation = state.evaluations.running
        if evaluation is None or len(state.members.relays) < 2:
            self.done = self._struck
        elif evaluation.version >= state.versions.newest:
            hold_up_evaluation(self.faults, state)
        elif not self._relay:
            self._relay = state.members.relay_chain[-1]
            self.faults.reward_slow = SLOW_REWARDS
            for process in self._machine(state):
                self.lose(process.name, "dies")
        elif self._relay in state.members.relays:
            has_weights = state.members.relays[self._relay].newest >= 0
            here = any(r.relay == self._relay for r in state.members.live_replicas())
            self.done = here if self._late else has_weights
            if self.done:
                return
            if self._late:
                self._hold_replicas(state, has_weights)
            elif here:
                self._strike(state)

    def _machine(self, state: State) -> list[SimProcess]:
        return self.world.children_of(state.members.relays[self._relay].node)

    def _hold_replicas(self, state: State, has_weights: bool) -> None:
        """Pause replicas until the relay has weights and a response waits for its reward."""
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
            self.world.lose_checkpoints()
        for replica in state.members.live_replicas():
            if replica.relay != self._relay:
                self.lose(replica.name, "dies")


class OnlyOneOfItsVersion(TargetedFault):
    """Loss of the only replica of a version with its work, while another one is empty."""

    kind = "only-one-of-its-version-lost"

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._ways = chance.sample(WAYS, 3)

    def look(self, state: State) -> None:
        if self.now < self.from_ns or state.run.phase != Phase.RUNNING:
            return
        replicas = state.members.replicas.values()
        idle = [r for r in replicas if not r.running and not r.loading and r.version >= 0]
        if not idle:
            return
        versions = Counter(r.version for r in replicas)
        in_reach = {version for r in idle for version in state.members.list_held_versions(r)}
        for replica in replicas:
            if replica.running and versions[replica.version] == 1 and replica.version in in_reach:
                self.from_ns = self.now + seconds(2 * self.faults.lease_s)
                self.struck()
                self.lose(replica.name, self._ways.pop())
                self.done = not self._ways
                return


class OldVersion(TargetedFault):
    """Loss of all relays while a replica is slow with an older version that has a checkpoint.

    The relays come back with the newest version only. Each subclass decides what is lost then.
    """

    evaluates = False
    """Whether the version is that of an evaluation."""

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self.victim: tuple[str, int] = ("", -1)  #: replica and its version
        self._tries = 3

    @abstractmethod
    def strike(self, state: State) -> None:
        """Strike: no relay has the version, and `ripe` holds."""

    def ripe(self, state: State) -> bool:
        """Return whether the moment of the fault has come."""
        return _evaluation_ripe(state, self.victim[1])

    def look(self, state: State) -> None:
        if self.now < self.from_ns or state.run.phase != Phase.RUNNING:
            return
        name, version = self.victim
        replica = state.members.replicas.get(name)
        if replica is None or not replica.running or replica.version != version:
            self._begin(state)
        elif master_relay(state) is None or version in indexes_of(state).held:
            return
        elif self.ripe(state):
            self.done = True
            self.struck()
            self.strike(state)

    def _begin(self, state: State) -> None:
        candidates = self._candidates(state)
        if candidates and self.evaluates:
            hold_up_evaluation(self.faults, state)
        victim = next((r for r in candidates if r.version < state.versions.newest), None)
        if victim is None or not state.members.relay_chain:
            return
        self.victim = victim.name, victim.version
        self._tries -= 1
        self.done = not self._tries
        self.faults.reward_slow = SLOW_REWARDS
        self.faults.speed(self.world.processes[victim.name], SLOW)
        for relay in list(state.members.relay_chain):
            self.lose(relay, "dies")

    def _candidates(self, state: State) -> list[Replica]:
        """Return the replicas that work with such a version."""
        evaluations = state.evaluations
        working = [
            r
            for r in state.members.replicas.values()
            if r.running and r.version in state.versions.checkpoint_paths
        ]
        if not self.evaluates or not state.data.num_eval:
            return working
        evaluated_version = evaluations.running.version if evaluations.running is not None else -1
        return [r for r in working if r.version == evaluated_version]


class EvictedVersion(OldVersion):
    """Loss of the replica of an evicted version, or of all; half of the time of checkpoints, too.

    Mostly the version is an evaluation's, whose open samples then cannot be placed.
    """

    kind = "evicted-version-lost"
    share = 1.0  # two kinds of work, and few runs keep checkpoints

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        super().__init__(faults, chance)
        self._removes, self._all = chance.random() < 0.5, chance.random() < 0.5
        self.evaluates = chance.random() < 0.7
        if self.evaluates:
            self._removes = self._all = True

    def strike(self, state: State) -> None:
        if self._removes:
            self.world.lose_checkpoints()
        for victim in list(state.members.replicas) if self._all else [self.victim[0]]:
            self.lose(victim)


class CheckpointOutdated(OldVersion):
    """Death of all replicas with a version whose checkpoint is removed for a newer one.

    The replicas that load the checkpoint instead are slow.
    """

    kind = "checkpoint-outdated"

    def ripe(self, state: State) -> bool:
        """Return whether a newer checkpoint that replaces this one is being written."""
        scenario = self.world.scenario
        oldest, newest = (
            min(state.versions.checkpoint_paths, default=-1),
            max(state.versions.checkpoint_paths, default=-1),
        )
        full = len(state.versions.checkpoint_paths) == scenario.config.trainer.max_ckpt_to_keep
        freq = scenario.settings.save_freq  # a fork without has the checkpoint that it began with
        written = state.versions.newest > newest and freq and state.versions.newest_step % freq == 0
        return bool(full and written and oldest == self.victim[1])

    def strike(self, state: State) -> None:
        for replica in state.members.replicas.values():
            if replica.version == self.victim[1]:
                self.lose(replica.name, "dies")
            elif not replica.running:
                self.faults.speed(self.world.processes[replica.name], SLOW)


class EvaluationStalls(OldVersion):
    """Stall of the replica with evaluation samples, whose restart is not carried out at first.

    All others are lost, and the checkpoints are gone.
    """

    kind = "evaluation-stalls"
    evaluates = True

    def strike(self, state: State) -> None:
        self.world.lose_checkpoints()
        for name in list(state.members.replicas):
            if name == self.victim[0]:
                self.faults.stall(self.world.processes[name])
            else:
                self.lose(name)


class NewestCheckpointDamaged(TargetedFault):
    """Death of the trainer with a damaged newest checkpoint and an older one that is whole."""

    kind = "newest-checkpoint-damaged"
    share = 1.0  # few runs keep several

    def look(self, state: State) -> None:
        trainer = self.world.processes["trainer-0"]
        paths = [
            str(RUN_DIR / state.versions.checkpoint_paths[version])
            for version in sorted(state.versions.checkpoint_paths)
        ]
        whole = [path for path in paths if path in self.world.models]
        if self.now < self.from_ns or len(whole) < 2 or whole[-1] != paths[-1]:
            return
        if self.faults.may_lose_trainer(trainer):
            self.done = True
            self.struck()
            self.world.models[paths[-1]].damaged = True
            self.lose(trainer.name, "dies")


def _evaluation_ripe(state: State, version: int) -> bool:
    """Return whether an evaluation of this version, if any, waits for a reward and a generation."""
    if state.evaluations.running is None or state.evaluations.running.version != version:
        return True
    generated = any(trajectory.status in IN_ENGINE for trajectory in evaluated(state))
    return generated and _waits_for_reward(state)


def _waits_for_reward(state: State) -> bool:
    """Return whether a response of the evaluation waits for its reward."""
    return any(trajectory.status == TrajectoryStatus.GENERATED for trajectory in evaluated(state))
