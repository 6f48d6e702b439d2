"""Cuts: one machine is partitioned from all others, in both directions or in one.

Reads   the world: which process is on which machine, and which processes it talks to
Writes  the world, through Effects: lines are cut, or hold what is sent until the cut is over
Gives   CUTS, kind -> strike

The coordinator is on the first machine, or, for some cuts, on a separate one. Half of the cuts lose
what is sent; the others hold it, as TCP does, and then the lines of each process resume at separate
times, so that messages may arrive when their sender has already ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar.events.base import COORDINATOR
from tools.simulator.faults.effects import CUT_OFF, HELD_UP, LOST, Effects
from tools.simulator.faults.targeted import HELD

FIRST = "node-0"
SERVERS = ("store", "relay")
"""Roles that receive requests of others, in addition to the coordinator."""
APART = 0.3  #: part of the cuts for which the coordinator is on a separate machine
BEYOND = 0.2
"""Part of the cuts that exceed the long lease, unless the coordinator is on a separate machine."""
HOLDS = 0.5  #: part of the cuts that hold what is sent
FLAPS = 5
FLAP = 0.25
"""Number of cuts of a line that flaps; length of each, and of the gap after it, in short leases."""
BACKOFF_S = 3.0
"""Longest additional delay after a cut until a line that held what was sent resumes; at most the
length of the cut, since TCP waits about as long again as it has waited."""

Line = tuple[str, str]  #: source and target


def _machine_cut_off(faults: Effects, chance: random.Random) -> None:
    """Cut a machine off for half a short lease to two, sometimes beyond the long lease."""
    cut = Cut(faults, chance)
    duration_s = faults.lease_s * chance.uniform(0.5, 2.0)
    if cut.apart:
        duration_s = min(duration_s, HELD * faults.lease_of_s("node"))
    elif chance.random() < BEYOND:
        duration_s = faults.lease_of_s("node") * chance.uniform(1.1, 1.5)
    cut.note(duration_s)
    cut.strike(duration_s, *cut.ways)


def _machine_cut_one_way(faults: Effects, chance: random.Random) -> None:
    """Cut all lines out of a machine, or all lines into it."""
    cut = Cut(faults, chance)
    duration_s = faults.lease_s * chance.uniform(0.5, 2.0 * HELD)
    cut.note(duration_s)
    cut.strike(duration_s, chance.choice(cut.ways))


def _machine_flaps(faults: Effects, chance: random.Random) -> None:
    """Cut a machine off repeatedly, each time for less than a lease.

    The machine is never silent as a whole for long. Where lines hold what is sent, one of them may
    be silent from cut to cut while others deliver in between: its process may be lost alone.
    """
    cut, duration_s = Cut(faults, chance), FLAP * faults.lease_s
    cut.note(duration_s)
    if cut.holds:
        cut.harm()
    for at in range(FLAPS):
        faults.later(2 * at * duration_s, cut.strike, duration_s, *cut.ways)


class Cut:
    """Partition of one machine: the lines between it and all others."""

    def __init__(self, faults: Effects, chance: random.Random) -> None:
        self._faults, self._chance = faults, chance
        processes = faults.world.processes.values()
        self.apart = chance.random() < APART
        self._place = {p.name: p.node for p in processes}
        self._place[COORDINATOR] = COORDINATOR if self.apart else FIRST
        self._machine = chance.choice(list(dict.fromkeys(self._place.values())))
        self.holds = chance.random() < HOLDS
        servers = [COORDINATOR, *(p.name for p in processes if p.role in SERVERS)]
        lines = [
            line
            for name in self._place
            for server in servers
            if self._is_inside(name) != self._is_inside(server)
            for line in ((name, server), (server, name))
        ]
        #: lines out of the machine, and into it
        self.ways = (
            [line for line in dict.fromkeys(lines) if self._is_inside(line[0])],
            [line for line in dict.fromkeys(lines) if self._is_inside(line[1])],
        )

    def note(self, duration_s: float) -> None:
        """Record that a cut may lose processes once, and beyond the long lease their machine."""
        self.harm(CUT_OFF)
        if duration_s > self._faults.lease_of_s("node"):
            self.harm(LOST)

    def harm(self, how: str = HELD_UP) -> None:
        """Record harm to every process that the cut separates from the coordinator."""
        for name in self._apart():
            self._faults.harm(name, how)

    def _apart(self) -> list[str]:
        here = self._is_inside(COORDINATOR)
        return [n for n in self._place if self._is_inside(n) != here and n != COORDINATOR]

    def strike(self, duration_s: float, *ways: list[Line]) -> None:
        """Cut these ways now."""
        faults, network = self._faults, self._faults.world.network
        if faults.healed:
            return
        goes_on_s: dict[str, float] = {}  #: seconds by process
        for source, target in [line for way in ways for line in way]:
            if not self.holds:
                faults.cut_line(source, target, duration_s)
                continue
            network.clog(source, target)
            name = target if source == COORDINATOR else source
            if name not in goes_on_s:
                later_s = self._chance.uniform(0, min(BACKOFF_S, duration_s))
                goes_on_s[name] = duration_s + later_s
            faults.later(goes_on_s[name], network.unclog, source, target)

    def _is_inside(self, name: str) -> bool:
        return self._place[name] == self._machine


CUTS: dict[str, Callable[[Effects, random.Random], None]] = {
    "machine-cut-off": _machine_cut_off,
    "machine-cut-one-way": _machine_cut_one_way,
    "machine-flaps": _machine_flaps,
}
