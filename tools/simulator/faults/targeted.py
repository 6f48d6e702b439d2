"""Base of targeted faults: each waits for its moment, then loses or delays the process concerned.

Reads   the coordinator's state after each of its turns
Writes  the world, through Effects: a process is lost in one of five ways, or is slow
Gives   TargetedFault; lose, slow_down, evaluated, hold_up_evaluation for targeted_faults.py
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

from laminar.core.scheduling.groups import list_members
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus
from laminar.core.state.transitions import IN_ENGINE
from laminar.core.state.work import Trajectory
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.names import exit_codes
from laminar.names.ids import Purpose
from tools.simulator.faults.effects import LOST, Effects
from tools.simulator.runtime.process import SimProcess
from tools.simulator.scenario import seconds
from tools.simulator.scheduler import MS

WAYS = ("dies", "leaves", "complains", "replaced", "silent")
"""Ways to lose a process; `silent`: it is paused for longer than its lease."""
LAST_WORDS: dict[str, Event] = {
    "leaves": ev.ActorLeft(),
    "complains": ev.ActorFailed(reason="out of memory", user_error=False),
}
SILENCE = 1.5  #: length of that pause in leases
HELD = 0.8  #: part of its lease for which a process may be paused without being lost
SLOW = 20.0
SLOW_REWARDS = 5.0


def lose(faults: Effects, process: SimProcess, way: str) -> None:
    """Lose the process in this way, even if it is paused."""
    if not process.alive or process.stopping:
        return
    faults.harm(process.name, LOST)
    if way == "silent":
        faults.pause(process, faults.lease_of_s(process.role) * SILENCE)
    elif way == "replaced":
        process.replace()
    elif way in LAST_WORDS and process.welcomed:
        process.emit(LAST_WORDS[way])
        faults.world.scheduler.after(10 * MS, _die, process, process.boot)
    else:
        process.die(exit_codes.KILLED)


def _die(process: SimProcess, boot: int) -> None:
    if process.boot == boot:
        process.die(exit_codes.FAILED)


def slow_down(faults: Effects, state: State, version: int) -> None:
    """Slow down all replicas that have this version."""
    for replica in state.members.replicas.values():
        if replica.version == version:
            faults.speed(faults.world.processes[replica.name], SLOW)


def evaluated(state: State) -> Iterator[Trajectory]:
    """Yield all samples of the evaluation whose groups have no end yet."""
    for group in state.work.groups.values():
        if group.purpose == Purpose.EVAL and group.status == GroupStatus.OPEN:
            yield from list_members(state, group.id)


def hold_up_evaluation(faults: Effects, state: State) -> None:
    """Slow down one replica of the evaluation, so that newer versions appear meanwhile."""
    running = (t for t in evaluated(state) if t.status in IN_ENGINE)
    found = next(running, None)
    if found is not None:
        faults.speed(faults.world.processes[found.replica], SLOW)


class TargetedFault(ABC):
    """Fault that strikes when the coordinator's state shows its moment."""

    kind: str
    share = 0.6  #: part of `faults.share` of the runs, unless a menu asks for it
    after_healing = False  #: whether it may strike after all has healed

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        self.faults, self.world, self.chance = faults, faults.world, chance
        self.done = False
        self.way = chance.choice(WAYS)
        self.from_ns = seconds(chance.uniform(0.5, 0.3 * faults.until_ns / 1e9))

    @abstractmethod
    def look(self, state: State) -> None:
        """Look at the state after a turn of the coordinator, and strike if the moment has come."""

    @property
    def now(self) -> int:
        return self.world.scheduler.now

    def struck(self) -> None:
        self.world.coverage.hit(f"fault:{self.kind}")

    def lose(self, name: str, way: str = "") -> None:
        lose(self.faults, self.world.processes[name], way or self.way)
