"""Effects that faults are made of: disturbing processes and links, and planning the next failure.

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
"""Ways in which a fault strikes: the process ends or is silent for its lease, is late or misled, or
is cut off from the coordinator."""
AWAITED: dict[str, tuple[str, ...]] = {
    "node": (), "store": (), "trainer": ("store", "relay"), "relay": ("relay", "trainer"),
    "rollout": ("store", "relay"),
}  # fmt: skip
"""Roles that a process of a role waits for while it works."""
TRAINER_LOSSES = 4  #: most losses of the trainer in one run
UNHEARD_S = 1.5  #: time longer than it takes to write a checkpoint, and much shorter than a lease
KILLED = 0.5  #: part of the lost nodes that are killed


class Effects:
    """State of all faults of one world, and the primitives that they use."""

    def __init__(self, world: World, until_ns: int, *, healed: bool) -> None:
        """`until_ns`: until when faults happen; `healed`: nothing goes wrong in this world."""
        self.world, self.until_ns, self.healed = world, until_ns, healed
        self._streams: dict[str, random.Random] = {}
        self.disk_full = self.full_for_good = False
        self.disk_fault = ""  #: kind of fault at the disk's next use
        self.dead: set[str] = set()  #: processes lost for good; never iterated over
        self.gone: set[str] = set()  #: nodes of machines lost for good; never iterated over
        self.unscorable: set[str] = set()  #: trajectories whose reward fails
        self.poison: tuple[int, ...] = ()  #: rows of prompts that kill every replica
        #: A pass over the data has a batch of other prompts; else each step would cost the deaths
        #: of several passes, and what runs next to the poison is blamed for them, too.
        self.may_poison = world.scenario.world.num_train > world.scenario.settings.groups_per_step
        self.reward_slow = 1.0  #: factor on the time that a reward takes
        #: stalled boots, and whether their node has yet to ignore the order to restart them
        self.stalled: dict[str, bool] = {}
        self.differs_next = False
        """Whether the trainer's next ordered publish has other bytes."""
        self.dies_next = ""  #: failpoint at which the trainer dies
        self.unheard_next = False  #: whether its reports of steps until then are lost
        self.wrong: dict[str, int] = {}  #: number of next loads that prove wrong, by replica
        self.sticks_next = False  #: whether the next transfer along the chain hangs
        self.trainer_hung = False  #: whether a step has never ended
        self.step_longer_s = 0.0  #: added to the trainer's next step
        self.load_longer_s = 0.0  #: added to its next start
        #: ways in which faults struck, by process, by role (any process of it), or EVERYBODY
        self.harmed: dict[str, set[str]] = {}

    def harm(self, who: str, how: str = HELD_UP) -> None:
        """Record that a fault strikes; checks excuse a loss only by such a record."""
        self.harmed.setdefault(who, set()).add(how)

    def has_lost(self, process: Process) -> bool:
        """Return whether a fault ended or silenced this process, or the node that restarts it."""
        names = (EVERYBODY, process.name, process.node)
        return any(LOST in self.harmed.get(name, ()) for name in names)

    def explains(self, process: Process) -> bool:
        """Return whether a fault struck this process, one that it waits for, or everybody."""
        return bool(self._struck(process))

    def only_cut_off(self, process: Process) -> bool:
        """Return whether cuts of machines are the only faults that struck any of those."""
        return self._struck(process) == {CUT_OFF}

    def _struck(self, process: Process) -> set[str]:
        awaited = AWAITED[process.role]
        at_work = [process, *(p for p in self.world.processes.values() if p.role in awaited)]
        names = {EVERYBODY, process.role, *awaited}
        names.update(*((p.name, p.node) for p in at_work))
        return {how for name in names for how in self.harmed.get(name, ())}

    def may_lose_trainer(self, process: Process) -> bool:
        """Return whether the trainer can come back if it is lost now.

        That takes a checkpoint, or that the first step is known, and a restart by its node. A batch
        that is interrupted too often ends the run.
        """
        world, state = self.world, self.world.coordinator.state
        starts_left = process.boot < min(world.config.recovery.max_restarts, TRAINER_LOSSES)
        lives = process.alive and not process.stopping and not process.paused
        resumes = bool(world.scenario.settings.save_freq) and not world.checks.training.lost
        return lives and starts_left and resumes and state is not None and not self.dead

    @property
    def can_begin_again(self) -> bool:
        """Whether the run can be resumed: all that a resume needs is on disk."""
        kept = bool(self.world.scenario.settings.save_freq) and not self.world.checks.training.lost
        return kept and not self.dead and self.world.coordinator.up

    def dies_at(self, process: Process, point: str) -> bool:
        """Return whether a process dies at this failpoint, which may be after all has healed."""
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
        return self.world.config.coordinator.lease_ms / 1000

    def lease_of_s(self, role: str) -> float:
        return self.world.scenario.lease_of_ms(role) / 1000

    def is_gone(self, node: Process) -> bool:
        """Return whether this node is never restarted."""
        return node.name in self.dead or node.name in self.gone

    def restart_machine(self, node: SimProcess) -> bool:
        """Kill a machine's processes, then restart it; return False where that is not allowed."""
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
        """Return whether the run ends without the trainer, and no crash can take that back."""
        coordinator = self.world.coordinator
        if not coordinator.up or coordinator.state is None:
            return False
        return broadcast.is_run_ending(coordinator.state) and self.world.checks.log_is_whole()

    def lose_node(self, node: SimProcess) -> None:
        """Lose one node for good, without its processes, once it has started them; once in a run.

        The processes continue, as those of a hanging node do, or end, as those of a killed node do.
        The store and trainer, whose end is that of the run, end only in a run that is to fail.
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
        """Record that the user restarted the whole run, including a node that was lost alone."""
        self.harm(EVERYBODY, LOST)
        for name in [p.name for p in self.world.processes.values() if p.role == "node"]:
            if not any(child.name in self.dead for child in self.world.children_of(name)):
                self.dead.discard(name)

    def later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self.world.scheduler.after(seconds(delay_s), action, *args)

    def stall(self, process: SimProcess) -> None:
        """Stop a live replica from sampling; its node ignores the first order to restart it.

        That holds even if everything else has healed by then.
        """
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
        """Lose what is sent from one to the other for a while."""
        self.world.network.cut(source, target, +1)
        self.later(duration_s, self._mend, source, target, self.healed)

    def _mend(self, source: str, target: str, healed: bool) -> None:
        if self.healed == healed:  # heal() has mended earlier cuts
            self.world.network.cut(source, target, -1)

    def chance(self, concern: str) -> random.Random:
        """Return the random stream of one concern."""
        found = self._streams.get(concern)
        if found is None:
            seed = self.world.scenario.seed
            found = self._streams[concern] = stream(seed, f"fault {concern}")
        return found
