"""Cuts: a machine and all others do not hear each other, or one side does not hear the other.

Reads   the world: who is on which machine, and whom they talk to
Writes  the world, through Effects: lines are cut, or hold what is sent until the cut is over
Gives   CUTS, kind -> strike

The coordinator is on the first machine, or, for some cuts, on one of its own. Half of the cuts lose
what is sent; the others hold it, as TCP does, and then the lines of each process go on in their own
time, so that words may arrive when the process that has said them has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar.events.base import COORDINATOR
from tools.simulator.faults.effects import CUT_OFF, HELD_UP, LOST, Effects
from tools.simulator.faults.targeted import HELD

FIRST = "node-0"
SERVERS = ("store", "relay")
"""Roles that others send requests to, besides the coordinator."""
APART = 0.3
"""Part of the cuts for which the coordinator is on a machine of its own."""
BEYOND = 0.2
"""Part of the cuts of one machine that take longer than the long lease, but one of those."""
HOLDS = 0.5
"""Part of the cuts that hold what is sent."""
FLAPS = 5
FLAP = 0.25
"""Part of the short lease for which a line that flaps is cut, then whole, so often."""
BACKOFF_S = 3.0
"""By how much a line that held what was sent may go on later than others, and no more than by the
length of the cut: TCP waits about as long again as it has waited."""

Line = tuple[str, str]  #: source and target


def _machine_cut_off(faults: Effects, chance: random.Random) -> None:
    """A machine is cut off for half a short lease to two, now and then for more than the long
    one."""
    cut = Cut(faults, chance)
    duration_s = faults.lease_s * chance.uniform(0.5, 2.0)
    if cut.apart:
        duration_s = min(duration_s, HELD * faults.lease_of_s("node"))
    elif chance.random() < BEYOND:
        duration_s = faults.lease_of_s("node") * chance.uniform(1.1, 1.5)
    cut.note(duration_s)
    cut.strike(duration_s, *cut.ways)


def _machine_cut_one_way(faults: Effects, chance: random.Random) -> None:
    """What it says arrives nowhere, or it hears nobody."""
    cut = Cut(faults, chance)
    duration_s = faults.lease_s * chance.uniform(0.5, 2.0 * HELD)
    cut.note(duration_s)
    cut.strike(duration_s, chance.choice(cut.ways))


def _machine_flaps(faults: Effects, chance: random.Random) -> None:
    """It is cut off again and again, each time for less than a lease.

    It is never silent as a whole for long. Where lines hold what is sent, one of them may be silent
    from cut to cut while others speak in between: its process may be lost alone.
    """
    cut, duration_s = Cut(faults, chance), FLAP * faults.lease_s
    cut.note(duration_s)
    if cut.holds:
        cut.harm()
    for at in range(FLAPS):
        faults.later(2 * at * duration_s, cut.strike, duration_s, *cut.ways)


class Cut:
    """One machine, and the lines between it and all others."""

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
        """Who does not hear the coordinator, or is not heard by it, may be lost for it once; after
        the long lease its machine is."""
        self.harm(CUT_OFF)
        if duration_s > self._faults.lease_of_s("node"):
            self.harm(LOST)

    def harm(self, how: str = HELD_UP) -> None:
        """It strikes everybody on the other side of the coordinator's."""
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
        goes_on_s: dict[str, float] = {}  #: by process
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
