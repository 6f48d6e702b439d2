"""Faults of one seed: a random part of a menu, with random rates.

Reads   FaultConfig, the seed
Writes  the world, when faults are due at random (random_faults.py) or find their moment
        (targeted_faults.py), and when all heals
Gives   answers to models that ask whether a fault strikes them; KINDS

Faults happen until `heal`; from then on nothing new goes wrong, and what was broken is mended. Each
kind draws from a separate random stream. A process that a run needs in order to continue (node,
store, trainer, relay) is only disturbed for less than its lease, unless the run is to fail.
"""

from __future__ import annotations

import random

from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names import exit_codes
from laminar.names.ids import Purpose
from tools.simulator.config import FaultConfig
from tools.simulator.context import Process
from tools.simulator.disk import CRASH_MODES, CrashMode, SimDisk
from tools.simulator.faults.cuts import CUTS
from tools.simulator.faults.effects import EVERYBODY, LOST, Effects
from tools.simulator.faults.random_faults import (
    EXITS,
    HOSTS,
    RECURRING,
    RUN,
    SILENCES,
    STORE,
    TRAINER,
)
from tools.simulator.faults.targeted import SILENCE, WAYS, TargetedFault, lose
from tools.simulator.faults.targeted_faults import TARGETED
from tools.simulator.network import Weather
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds, stream
from tools.simulator.scheduler import MS
from tools.simulator.world import World

WEATHER = ("loss", "duplicates", "reorder", "bit-flips")
RATES = (
    "weights-corrupt", "chunk-damaged", "publish-skipped", "reward-fails", "sibling-refused",
    "hangs",
)  # fmt: skip
WEDGES = ("command-ignored", "transfer-sticks")
"""Actions that are silently omitted; a timeout reveals it, if no other process does the work."""
IGNORABLE = (cmd.ForwardWeights, cmd.PullWeights, cmd.ScoreTrajectories, cmd.StopActor)
"""Commands that replicas or relays ignore, one of these in a run; nodes then ignore restarts."""
HARMED: dict[str, tuple[str, ...]] = {
    "weights-corrupt": ("rollout",), "chunk-damaged": ("relay",),
    "publish-skipped": ("trainer", "relay"), "reward-fails": ("rollout",),
    "sibling-refused": ("rollout",), "hangs": ("rollout",), "start-hangs": ("rollout",),
    "command-ignored": ("rollout", "relay"), "transfer-sticks": ("relay",),
    "trainers-disk-full": ("trainer",), "trainer-hangs": ("trainer",),
}  # fmt: skip
"""Roles whose processes are late or misled when one of these strikes."""
OF_COORDINATOR = (
    "coordinator-killed", "coordinator-cut", "coordinator-paused", "disk-error", "disk-full",
    "clock-step", "disk-full-long", "disk-full-for-good",
)  # fmt: skip
"""Faults of the coordinator; meanwhile every process may be late."""
ONCE = ("poison-prompt", "node-storm", "drain", "machine-lost")
REWARD_ERRORS = "reward-errors"
ENGINE_DIFFERS = "engine-differs"
TRAINERS_DISK_FULL = "trainers-disk-full"
START_HANGS = "start-hangs"
TRAINER_HANGS = "trainer-hangs"
OWN_RATES = {
    REWARD_ERRORS: (0.1, 0.3, 1.0), ENGINE_DIFFERS: (0.02, 0.1, 1.0),
    TRAINERS_DISK_FULL: (0.1, 0.3), START_HANGS: (0.1, 0.3), TRAINER_HANGS: (0.1, 0.5),
}  # fmt: skip
"""Rates drawn from separate streams."""
RARE = {
    "drain": 0.3, REWARD_ERRORS: 0.3, TRAINER_HANGS: 0.2, "node-dies": 0.3,
    "disk-full-for-good": 0.1, "store-dies": 0.3, "store-replaced": 0.2, "store-silent": 0.2,
    "run-dies": 0.2, "run-pauses": 0.2, "machine-restarts": 0.5, "machine-stands-still": 0.3,
    "machine-cut-off": 0.3, "machine-cut-one-way": 0.3, "machine-flaps": 0.3,
}  # fmt: skip
"""Factors on `share` for kinds that cut a run short or delay all of it, unless a menu names one."""
FATAL_ROLES = ("node", "store", "trainer", "relay")
"""Roles of the first machine, which is lost with its node. Its relay may die and come back, but
only if its node restarts it."""
AGAIN_S = 0.05
EARLY, EARLY_S = 0.3, 0.3
"""Part of such losses that come before all processes have joined; the time by which they come."""
LATER = SILENCES | EXITS | STORE | TRAINER | RUN | CUTS | HOSTS


class Faults(Effects):
    """All faults of one world, and when they strike."""

    def __init__(self, world: World) -> None:
        seed, config = world.scenario.seed, world.scenario.world.faults
        chance = stream(seed, "faults")
        menu = [kind for kind in config.menu or UNTARGETED if kind in UNTARGETED]
        calm = chance.random() < config.calm_share
        super().__init__(world, seconds(_pick(chance, config.seconds)), healed=calm)
        rare = {} if config.menu else RARE
        shares = {kind: config.share * rare.get(kind, 1.0) for kind in menu}
        self.active = [kind for kind in menu if chance.random() < shares[kind] and not calm]
        self.every_s = {kind: _pick(chance, config.every_s) for kind in UNTARGETED}
        self.rates = {kind: chance.choice([0.02, 0.1, 0.3]) for kind in RATES}
        self.rates |= {kind: self.chance(kind).choice([0.1, 0.3, 1.0]) for kind in WEDGES}
        #: type of command that is ignored
        self.ignored = stream(seed, "ignored command").choice(IGNORABLE)
        self.fatal_role = ""
        if not calm and chance.random() < config.fatal_share:
            self.fatal_role = chance.choice((*FATAL_ROLES, "store"))  # most ways to be lost
        fatal = stream(seed, "fatal way")
        self.fatal_way, self._fatal_early = fatal.choice(WAYS), fatal.random() < EARLY
        if self.fatal_way == "replaced" and self.fatal_role in ("node", "relay"):
            self.fatal_way = "dies"  # a new relay would do, and a new node starts all afresh
        self.storm = "node-storm" in self.active
        if "poison-prompt" in self.active and not self.may_poison:
            self.active.remove("poison-prompt")
        if "poison-prompt" in self.active:
            self.poison = (chance.randrange(world.scenario.world.num_train),)
        self._targeted = [] if calm else self._drawn_targeted(config)
        if not calm:
            self._draw_later(config)
            self._draw_own_rates(config)

    def _drawn_targeted(self, config: FaultConfig) -> list[TargetedFault]:
        """Draw the targeted faults, each from a separate stream: a new one changes no others."""
        found = []
        for kind in config.menu or TARGETED:
            if kind in TARGETED:
                chance = self.chance(kind)
                share = config.share * (1.0 if config.menu else TARGETED[kind].share)
                if chance.random() < share:
                    self.active.append(kind)
                    found.append(TARGETED[kind](self, chance))
        return found

    def _draw_later(self, config: FaultConfig) -> None:
        """Draw the faults of LATER, each from a separate stream."""
        rare = {} if config.menu else RARE
        for kind in config.menu or LATER:
            if kind in LATER:
                chance = self.chance(kind)
                if chance.random() < config.share * rare.get(kind, 1.0):
                    self.active.append(kind)
                    self.every_s[kind] = _pick(chance, config.every_s)

    def _draw_own_rates(self, config: FaultConfig) -> None:
        """Draw the faults of OWN_RATES and their rates, each from a separate stream."""
        for kind, rates in OWN_RATES.items():
            chance = self.chance(kind)
            share = config.share * (1.0 if config.menu else RARE.get(kind, 1.0))
            if kind in (config.menu or KINDS) and chance.random() < share:
                self.active.append(kind)
                self.rates[kind] = chance.choice(rates)

    def begin(self) -> None:
        """Set the weather, and plan the first fault of each kind."""
        if self.healed:
            return
        self.world.network.weather = self._weather()
        if not {*WEATHER}.isdisjoint(self.active):
            self.harm(EVERYBODY)
        for kind in self.active:
            if kind in STRIKES:
                self._again(kind)
        if "drain" in self.active:
            when = seconds(self.chance("drain").uniform(0.1, 60))
            self.world.scheduler.at(when, self._drain)
        if "machine-lost" in self.active:
            when = seconds(self.chance("machine").uniform(0.1, self.until_ns / 1e9))
            self.world.scheduler.at(when, self._machine_lost)
        if self.fatal_role:
            when = seconds(self.chance("fatal").uniform(0.02, self._fatal_latest_s()))
            self.world.scheduler.at(when, self._lose_for_good)
        self.world.scheduler.at(self.until_ns, self.heal)

    def _fatal_latest_s(self) -> float:
        if self._fatal_early:
            return EARLY_S
        lease_s = self.lease_of_s(self.fatal_role)
        silence_s = 2 * SILENCE * lease_s if self.fatal_way == "silent" else 0.0
        return max(self.until_ns / 1e9 - silence_s, EARLY_S)  # it must not heal before it is lost

    def heal(self) -> None:
        """Stop all faults, and mend everything that can be mended."""
        if self.healed:
            return
        self.healed = True
        self._targeted = [fault for fault in self._targeted if fault.after_healing]
        self.disk_full = self.full_for_good
        self.disk_fault = ""
        self.reward_slow = 1.0
        self.world.database.full = False
        self.world.network.heal()
        self.world.coordinator.resume()
        for process in self.world.processes.values():
            self.speed(process, 1.0)
            process.resume()

    def turned(self, state: State) -> None:
        """Let targeted faults look at the state after a turn of the coordinator."""
        for fault in self._targeted:
            fault.look(state)
        if any(fault.done for fault in self._targeted):
            self._targeted = [fault for fault in self._targeted if not fault.done]

    # --- questions of the models ----------------------------------------------------------------

    def publish_fails(self) -> bool:
        return self._strikes("publish-skipped")

    def trainers_disk_is_full(self) -> bool:
        return self._strikes(TRAINERS_DISK_FULL)

    def publish_differs(self) -> bool:
        differs, self.differs_next = self.differs_next and not self.healed, False
        if differs:
            self.harm("relay")
        return differs

    def start_hangs(self) -> bool:
        """Return whether an engine never comes up."""
        return self._strikes(START_HANGS)

    def trainer_hangs(self) -> bool:
        """Return whether a step never ends, once in a run whose trainer may be lost."""
        if self.trainer_hung or not self.world.config.trainer.save_freq:
            return False
        self.trainer_hung = self._strikes(TRAINER_HANGS)
        return self.trainer_hung

    def hangs(self, command: cmd.GenerateTrajectory) -> bool:
        return self._strikes("hangs")

    def refuses(self, command: cmd.GenerateTrajectory) -> bool:
        return self._strikes("sibling-refused")

    def damages_chunk(self) -> bool:
        return self._strikes("chunk-damaged")

    def ignores(self, process: Process, command: Command) -> bool:
        """Return whether a process sends heartbeats, but never carries out this command."""
        if process.role == "node" and isinstance(command, cmd.RestartActor):
            return self._keeps_stalled(command) or self._strikes("command-ignored")
        if type(command) is not self.ignored or process.role not in ("rollout", "relay"):
            return False
        return self._strikes("command-ignored")

    def sticks(self) -> bool:
        """Return whether a relay connected to its successor sends nothing more."""
        if self.sticks_next and not self.healed:
            self.sticks_next = False
            self.harm("relay")
            return True
        return self._strikes("transfer-sticks")

    def long_step_s(self) -> float:
        """Return by how much longer the trainer's next step takes."""
        long_s, self.step_longer_s = self.step_longer_s, 0.0
        return long_s

    def long_load_s(self) -> float:
        """Return by how much longer the trainer's next start takes."""
        long_s, self.load_longer_s = self.load_longer_s, 0.0
        return long_s

    def dead_for_good(self, process: Process) -> bool:
        """Return whether the node of this process has given up on it."""
        return process.name in self.dead

    def corrupts_weights(self, process: Process) -> bool:
        """Return whether the weights that this replica loaded differ from those published."""
        if self.wrong.get(process.name) and not self.healed:
            self.wrong[process.name] -= 1
            self.harm(process.name)
            return True
        return self._strikes("weights-corrupt")

    def loses_reward_worker(self) -> bool:
        return self._strikes("reward-fails")

    def reward_reason(self) -> str:
        """Return the outcome of the user's reward function for one response."""
        return "error" if self._strikes(REWARD_ERRORS) else "ok"

    def engine_differs(self) -> bool:
        """Return whether the trainer finds that a row did not come from the weights it names."""
        return self._strikes(ENGINE_DIFFERS)

    def poisonous(self, command: cmd.GenerateTrajectory) -> bool:
        """Return whether a prompt kills replicas; it does so every time."""
        poisonous = command.purpose == Purpose.TRAIN and command.row_index in self.poison
        if poisonous:
            self.harm(command.to, LOST)
        return poisonous

    def before_disk_use(self, disk: SimDisk) -> None:
        """Plan the failure of the coordinator's next disk calls."""
        if self.disk_full:
            disk.plan(disk.calls + 1, "enospc")
        elif self.disk_fault == "coordinator-cut":
            disk.plan(disk.calls + self.chance("cut").randint(1, 3), "crash")
        elif self.disk_fault:
            disk.plan(disk.calls + self.chance("eio").randint(1, 2), "eio")
        self.disk_fault = ""

    def crash_mode(self) -> CrashMode:
        return self.chance("crash-mode").choice(CRASH_MODES)

    def restart_delay_ns(self) -> int:
        """Return how long the coordinator's supervisor takes to restart it."""
        return seconds(self.chance("restart").choice([0.1, 0.5, 2.0, 6.0]))

    # --- planning -----------------------------------------------------------------------------

    def _strikes(self, kind: str) -> bool:
        if self.healed or kind not in self.active:
            return False
        struck = self.chance(kind).random() < self.rates[kind]
        if struck:
            for role in HARMED.get(kind, ()):
                self.harm(role)
            self.world.coverage.hit(f"fault:{kind}")
        return struck

    def _keeps_stalled(self, command: cmd.RestartActor) -> bool:
        """Return whether this is the first order to restart a stalled process."""
        boot = self.world.processes[command.actor].boot_id
        ignored = self.stalled.get(boot, False)
        if ignored:
            self.stalled[boot] = False
        return ignored

    def _weather(self) -> Weather:
        chance = self.chance("weather")
        most = {"loss": 0.3, "duplicates": 0.5, "reorder": 0.5, "bit-flips": 0.02}
        drawn = {kind: chance.uniform(0.01, most[kind]) for kind in WEATHER}
        now = {kind: drawn[kind] if kind in self.active else 0.0 for kind in WEATHER}
        late = int(chance.choice([5, 50, 400]) * MS)
        return Weather(
            now["loss"], now["duplicates"], now["reorder"], now["bit-flips"], extra_delay_ns=late
        )

    def _again(self, kind: str) -> None:
        wait_s = self.chance(kind).expovariate(1 / self.every_s[kind])
        self.world.scheduler.after(seconds(wait_s), self._strike, kind)

    def _strike(self, kind: str) -> None:
        if self.healed or self.world.finished:
            return
        self.world.coverage.hit(f"fault:{kind}")
        if kind in OF_COORDINATOR:
            self.harm(EVERYBODY)
        STRIKES[kind](self, self.chance(kind))
        self._again(kind)

    # --- faults that strike once ------------------------------------------------------------------

    def _drain(self) -> None:
        if not self.healed and not self.world.finished:
            self.world.coverage.hit("fault:drain")
            at_once = self.chance("drain").random() < 0.25
            self.world.coordinator.report(ev.DrainRequested(reason="SIGINT", at_once=at_once))

    def _machine_lost(self) -> None:
        """Kill all processes of a machine at once and for good; never those of the first."""
        machines = [p for p in self.world.processes.values() if p.role == "node"][1:]
        if self.healed or self.world.finished or not machines:
            return
        self.world.coverage.hit("fault:machine-lost")
        node = self.chance("machine").choice(machines)
        self.gone.add(node.name)
        for process in (node, *self.world.children_of(node.name)):
            self.harm(process.name, LOST)
            process.die(exit_codes.KILLED)

    def doomed(self) -> list[SimProcess]:
        """Return the processes lost in a run that is to fail; a node is lost with its machine."""
        process = self.world.processes[f"{self.fatal_role}-0"]
        return [process, *self.world.children_of(process.name)]

    def _lose_for_good(self) -> None:
        """Lose a process for good, a node with its machine; nothing restarts them."""
        if self.healed or self.world.finished:
            return
        process, *_ = doomed = self.doomed()
        if not process.alive:  # it is being started
            return self.later(AGAIN_S, self._lose_for_good)
        self.world.coverage.hit(f"fault:lost-{self.fatal_role}")
        for each in doomed:
            self.dead.add(each.name)
            lose(self, each, self.fatal_way)


def _pick(chance: random.Random, value: float | tuple[float, ...]) -> float:
    return chance.choice(value) if isinstance(value, tuple) else value


UNTARGETED: tuple[str, ...] = (*RECURRING, *WEATHER, *RATES, *WEDGES, *ONCE)
KINDS: tuple[str, ...] = (*UNTARGETED, *LATER, *OWN_RATES, *TARGETED)
STRIKES = RECURRING | LATER
