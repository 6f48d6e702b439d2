"""Repack: which replicas give what they run to which others, so that they can take new work.

Reads   StragglerLoad of the replicas in their tail, all of one weight version
Gives   plan: moves, each of everything that one replica runs to another one; why_not, of one that
        is not moved
Source  the paper's section 5, Algorithm 1; its faults are mended: a replica that has been given
        work is not emptied later, and some room is left for what moved work still samples

Pure and in whole numbers. Times are counted in decode steps: a replica that is emptied gains the
steps for which its stragglers would have kept it; what they cost elsewhere is prefill, during which
the destination's batch waits, and slower steps there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from laminar.core.state.straggler_load import StragglerLoad

CANDIDATES_MAX = 4
"""Destinations of each class for one source: planning for 10,000 replicas takes no seconds."""


class PlannedMigration(NamedTuple):
    """Everything that `source` runs goes to `destination`."""

    source: str
    destination: str


class _PlannedLoad:
    """A replica with what is planned for it."""

    __slots__ = ("need", "pinned", "running", "spare", "standing")

    def __init__(self, standing: StragglerLoad) -> None:
        self.standing = standing
        self.need, self.running = standing.need, standing.running
        self.spare = min(standing.max_batch - standing.running, standing.room)  #: trajectories
        self.pinned = False

    def can_fit(self, source: _PlannedLoad) -> bool:
        return source.running <= self.spare and (
            self.need + source.need <= self.standing.kv_capacity
        )

    def add_work(self, source: _PlannedLoad) -> None:
        self.need += source.need
        self.running += source.running
        self.spare -= source.running
        self.pinned = True


class _Destinations:
    """The replicas that are not emptied, by how many more each can run: in classes of powers of
    two, so that a search looks at a few of them and not at all; within a class by need.

    An entry of a class is need * number of all + number: it sorts by both, and fast."""

    def __init__(self, loads: list[_PlannedLoad]) -> None:
        self._loads = loads
        self._need_max = max((load.standing.kv_capacity for load in loads), default=0)
        sizes = max((load.spare.bit_length() for load in loads), default=0) + 1
        self._classes: list[list[int]] = [[] for _ in range(sizes)]
        for number, load in enumerate(loads):
            self._classes[load.spare.bit_length()].append(load.need * len(loads) + number)
        for ranked in self._classes:
            ranked.sort()

    def put_in(self, number: int) -> None:
        load = self._loads[number]
        insort(self._classes[load.spare.bit_length()], load.need * len(self._loads) + number)

    def remove_load(self, number: int) -> None:
        load = self._loads[number]
        ranked = self._classes[load.spare.bit_length()]
        del ranked[bisect_left(ranked, load.need * len(self._loads) + number)]

    def find_best(self, source: _PlannedLoad, prefill_tokens: int) -> int:
        """The fullest replica on which the work fits and for which it pays; -1: none."""
        loads, found = self._loads, -1
        over = (self._need_max - source.need + 1) * len(loads)
        for ranked in self._classes[source.running.bit_length() :]:
            end = bisect_left(ranked, over)
            for entry in reversed(ranked[max(end - CANDIDATES_MAX, 0) : end]):
                if entry <= found:
                    break
                load = loads[entry % len(loads)]
                if load.can_fit(source) and _is_profitable(source.standing, load, prefill_tokens):
                    found = entry
                    break
        return found % len(loads) if found >= 0 else -1


def plan_packing(
    tail: Sequence[StragglerLoad], released_max: int, prefill_tokens: int
) -> list[PlannedMigration]:
    """Plan at most so many moves; sources ascending by their cache, each to the fullest that has
    room.

    `prefill_tokens` are prefilled in the time of a decode step; 0: what it costs is not asked.
    """
    loads = [_PlannedLoad(standing) for standing in tail]
    destinations = _Destinations(loads)
    moves: list[PlannedMigration] = []
    cached = [standing.kv_tokens for standing in tail]
    for number in sorted(range(len(tail)), key=cached.__getitem__):
        source = loads[number]
        if len(moves) >= released_max:
            break
        if source.pinned or not source.standing.movable:
            continue
        destinations.remove_load(number)
        other = destinations.find_best(source, prefill_tokens)
        if other < 0:
            destinations.put_in(number)
            continue
        destinations.remove_load(other)
        loads[other].add_work(source)
        destinations.put_in(other)
        moves.append(PlannedMigration(source.standing.name, tail[other].name))
    return moves


def find_not_packed_reason(
    source: StragglerLoad, others: Sequence[StragglerLoad], prefill_tokens: int
) -> str:
    """Why a plan leaves this one where it is, though it may be emptied; empty: it need not.

    `others`: of its version in their tail. `prefill_tokens`: as for a plan.
    """
    if not others:
        return "alone"
    own = _PlannedLoad(source)
    fitting = [load for load in map(_PlannedLoad, others) if load.can_fit(own)]
    if not fitting:
        return "no-room"
    return (
        "" if any(_is_profitable(source, load, prefill_tokens) for load in fitting) else "no-gain"
    )


def _is_profitable(source: StragglerLoad, load: _PlannedLoad, prefill_tokens: int) -> bool:
    """Steps of sequences that the emptied replica gains, against those that are lost elsewhere.

    A decode step is taken to be twice as long with max_batch sequences as with none.
    """
    if not prefill_tokens:
        return True
    limit, here, there = source.max_batch, source.running, load.running
    gained = (limit - here) * source.longest
    prefill = (there + here) * -(-source.kv_tokens // prefill_tokens)
    slower = source.longest * here * there * (2 * limit + here + there)
    return (gained - prefill) * (limit + here) * (limit + there) > slower
