"""What faults are made of: how processes and links are disturbed, and what is to go wrong next.

Reads   the world
Writes  the world: processes pause, slow down and die, links are cut
Gives   Effects, which the faults (random_faults.py, targeted*.py) use
"""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar.core.versions import broadcast
from laminar.events.base import COORDINATOR
from laminar.names import exit_codes
from tools.simulator.context import Process
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds, stream
from tools.simulator.world import World

STALLED = 1e9
EVERYBODY = "everybody"
LOST, HELD_UP, CUT_OFF = "lost", "held-up", "cut-off"
"""How a fault strikes: the process ends or is silent for its lease, or it is late or misled, or it
and the coordinator are on two sides of a cut."""
AWAITED: dict[str, tuple[str, ...]] = {
    "node": (), "store": (), "trainer": ("store", "relay"), "relay": ("relay", "trainer"),
    "rollout": ("store", "relay"),
}  # fmt: skip
"""Roles for which a process of a role waits while it works."""
TRAINER_LOSSES = 4
"""Losses of the trainer in one run, at most."""
UNHEARD_S = 1.5
"""Longer than it takes to write a checkpoint, and much less than a lease."""
KILLED = 0.5
"""Part of the nodes that are lost by being killed."""


class Effects:
    """What faults do to one world."""

    def __init__(self, world: World, until_ns: int, *, healed: bool) -> None:
        """`until_ns`: until when faults happen; `healed`: nothing goes wrong in this world."""
        self.world, self.until_ns, self.healed = world, until_ns, healed
        self._streams: dict[str, random.Random] = {}
        self.disk_full = self.full_for_good = False
        self.disk_fault = ""  #: kind of what goes wrong at the disk's next use
        self.dead: set[str] = set()  #: asked for membership only, never walked
        self.gone: set[str] = set()  #: nodes of machines that are lost for good, likewise
        self.unscorable: set[str] = set()  #: trajectories whose reward fails
        self.poison: tuple[int, ...] = ()  #: rows of prompts that kill every replica
        #: A pass over the data has a batch of other prompts; else each step would cost the deaths
        #: of several passes, and what runs beside the poison is blamed for them, too.
        self.may_poison = world.scenario.num_train > world.scenario.settings.groups_per_step
        self.reward_slow = 1.0  #: factor on the time that a reward takes
        #: boots that sample nothing more; whether their node has yet to ignore that they hang
        self.stalled: dict[str, bool] = {}
        self.differs_next = False
        """The trainer's next publish that it is ordered to make has other bytes."""
        self.dies_next = ""  #: place in its code where the trainer dies when it comes there
        self.unheard_next = False  #: what it says of its steps until then does not arrive
        self.wrong: dict[str, int] = {}  #: how many of its next loads prove wrong, by replica
        self.sticks_next = False  #: the next transfer along the chain does
        self.step_longer_s = 0.0  #: by how much the trainer's next step takes longer
        #: how faults have struck, by process, by role where any of it may be meant, or EVERYBODY
        self.harmed: dict[str, set[str]] = {}

    def harm(self, who: str, how: str = HELD_UP) -> None:
        """A fault strikes: what checks hold a loss against."""
        self.harmed.setdefault(who, set()).add(how)

    def has_lost(self, process: Process) -> bool:
        """A fault has ended or silenced this process, or its node, which would start it again."""
        names = (EVERYBODY, process.name, process.node)
        return any(LOST in self.harmed.get(name, ()) for name in names)

    def explains(self, process: Process) -> bool:
        """A fault has struck this process, what it waits for, or everybody."""
        return bool(self._struck(process))

    def only_cut_off(self, process: Process) -> bool:
        """No fault has struck any of those but cuts of machines."""
        return self._struck(process) == {CUT_OFF}

    def _struck(self, process: Process) -> set[str]:
        awaited = AWAITED[process.role]
        at_work = [process, *(p for p in self.world.processes.values() if p.role in awaited)]
        names = {EVERYBODY, process.role, *awaited}
        names.update(*((p.name, p.node) for p in at_work))
        return {how for name in names for how in self.harmed.get(name, ())}

    def may_lose_trainer(self, process: Process) -> bool:
        """Whether the trainer comes back: there is a checkpoint, or the first step is known, and
        its node starts it again. A batch that is interrupted too often ends the run."""
        world, state = self.world, self.world.coordinator.state
        starts_left = process.boot < min(world.scenario.max_restarts, TRAINER_LOSSES)
        lives = process.alive and not process.stopping and not process.paused
        resumes = bool(world.scenario.save_freq) and not world.checks.training.lost
        return lives and starts_left and resumes and state is not None and not self.dead

    @property
    def can_begin_again(self) -> bool:
        """The run is one that can be resumed: what that takes is on the disk."""
        kept = bool(self.world.scenario.save_freq) and not self.world.checks.training.lost
        return kept and not self.dead and self.world.coordinator.up

    def dies_at(self, process: Process, point: str) -> bool:
        """A process comes to this place in its code; some are come to only when all has healed."""
        if self.unheard_next and point == "trainer-book":
            self._cut(process.name, COORDINATOR, UNHEARD_S)
        if self.dies_next == point and self.may_lose_trainer(process):
            self.dies_next, self.unheard_next = "", False
            self.harm(process.name, LOST)
            self.world.coverage.hit(f"fault:{point}")
            return True
        return False

    @property
    def lease_s(self) -> float:
        return self.world.scenario.lease_ms / 1000

    def lease_of_s(self, role: str) -> float:
        return self.world.scenario.lease_of_ms(role) / 1000

    def is_gone(self, node: Process) -> bool:
        """Nobody starts this node again."""
        return node.name in self.dead or node.name in self.gone

    def restart_machine(self, node: SimProcess) -> bool:
        """A machine dies with its processes, and is started again. False where that may not be."""
        if not node.alive or node.stopping or self.is_gone(node):
            return False
        children = self.world.children_of(node.name)
        trainer = next((child for child in children if child.role == "trainer"), None)
        if trainer is not None and not self._is_ending() and not self.may_lose_trainer(trainer):
            return False
        for process in (node, *children):
            self.harm(process.name, LOST)
            process.die(exit_codes.KILLED)
        return True

    def _is_ending(self) -> bool:
        """Nobody waits for a trainer any more, and no crash of the coordinator takes that back."""
        coordinator = self.world.coordinator
        if not coordinator.up or coordinator.state is None:
            return False
        return broadcast.is_run_ending(coordinator.state) and self.world.checks.log_is_whole()

    def lose_node(self, node: SimProcess) -> None:
        """Lose one node for good, and alone, once it has started its processes. One of a run.

        They go on, as those of a node that hangs do, or end by themselves, as those of one that
        was killed; store and trainer, whose end is that of the run, only in a run that is to fail.
        """
        children = self.world.children_of(node.name)
        complete = all(child.started_by == node.boot_id for child in children)
        if self.dead or not node.alive or node.stopping or not complete:
            return
        self.dead.add(node.name)
        self.harm(node.name, LOST)
        node.die(exit_codes.KILLED)
        first = any(child.role == "store" for child in children)
        if not first and self.chance("node-killed").random() < KILLED:
            self.world.coverage.hit("fault:node-killed")
            for child in children:
                child.starter_gone()

    def begun_again(self) -> None:
        """The user has started the whole run: also a node that was lost alone."""
        self.harm(EVERYBODY, LOST)
        for name in [p.name for p in self.world.processes.values() if p.role == "node"]:
            if not any(child.name in self.dead for child in self.world.children_of(name)):
                self.dead.discard(name)

    def later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self.world.scheduler.after(seconds(delay_s), action, *args)

    def stall(self, process: SimProcess) -> None:
        """A replica lives and samples nothing more; its node does not do as ordered when that is
        noticed, also if everything else has healed by then."""
        self.speed(process, STALLED)
        self.stalled[process.boot_id] = True

    def speed(self, process: SimProcess, slow: float) -> None:
        if process.alive and process.slow != slow and process.boot_id not in self.stalled:
            if slow != 1.0:
                self.harm(process.name)
            process.model.pause()
            process.slow = slow
            process.model.resume()

    def pause(self, process: SimProcess, duration_s: float) -> None:
        process.pause()
        silent = duration_s >= self.lease_of_s(process.role)
        self.harm(process.name, LOST if silent else HELD_UP)
        boot = process.boot

        def resume() -> None:
            if process.boot == boot and process.name not in self.dead:
                process.resume()

        self.later(duration_s, resume)

    def cut(self, source: str, target: str, duration_s: float) -> None:
        if not self.healed:
            self._cut(source, target, duration_s)

    def _cut(self, source: str, target: str, duration_s: float) -> None:
        self.harm(source)
        self.harm(target)
        self.cut_line(source, target, duration_s)

    def cut_line(self, source: str, target: str, duration_s: float) -> None:
        """Have what is sent from one to the other be lost for a while."""
        self.world.network.cut(source, target, +1)
        self.later(duration_s, self._mend, source, target, self.healed)

    def _mend(self, source: str, target: str, healed: bool) -> None:
        if self.healed == healed:  # what was cut before is mended when all heals
            self.world.network.cut(source, target, -1)

    def chance(self, concern: str) -> random.Random:
        """The random stream of one concern."""
        found = self._streams.get(concern)
        if found is None:
            seed = self.world.scenario.seed
            found = self._streams[concern] = stream(seed, f"fault {concern}")
        return found
