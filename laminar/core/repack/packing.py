"""Packing: which replicas migrate their stragglers to which others, to take new work.

Reads   StragglerLoad of the replicas with only stragglers, all of one weight version
Gives   plan_packing: moves, each of everything that one replica runs to another one;
        find_not_packed_reason, for a replica that is not emptied
Source  the paper's section 5, Algorithm 1, with two corrections: a replica that has been given
        work is not emptied later, and room is reserved for tokens that moved work still samples

Pure, in integers only. Times are counted in decode steps: an emptied replica gains the steps for
which its stragglers would have occupied it. The cost is prefill at the destination, during which
its batch waits, and slower decode steps there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from laminar.core.state.migrations import StayReason, StragglerLoad

CANDIDATES_MAX = 4
"""Candidate destinations of each class per source: planning for 10,000 replicas stays fast."""


class PlannedMigration(NamedTuple):
    """A migration of everything that `source` runs to `destination`."""

    source: str
    destination: str


class _PlannedLoad:
    """A replica with the work planned for it."""

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
    """Replicas that are not emptied, in classes by spare slots, sorted by need within a class.

    Classes are powers of two, so that a search looks at a few replicas only. An entry of a class is
    need * number of all + number: it sorts by both, and fast."""

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
        """Return the fullest replica on which the work fits and for which it pays; -1: none."""
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
    """Plan at most `released_max` moves: sources by ascending cache, each to the fullest that fits.

    `prefill_tokens` are prefilled in the time of a decode step; 0: costs are ignored."""
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
) -> StayReason | None:
    """Return why a plan leaves a movable replica where it is; None: it need not.

    `others`: of its version with only stragglers. `prefill_tokens`: as for a plan."""
    if not others:
        return StayReason.ALONE
    own = _PlannedLoad(source)
    fitting = [load for load in map(_PlannedLoad, others) if load.can_fit(own)]
    if not fitting:
        return StayReason.NO_ROOM
    profitable = any(_is_profitable(source, load, prefill_tokens) for load in fitting)
    return None if profitable else StayReason.NO_GAIN


def _is_profitable(source: StragglerLoad, load: _PlannedLoad, prefill_tokens: int) -> bool:
    """Weigh the sequence steps that the emptied replica gains against those lost elsewhere.

    A decode step is assumed to take twice as long with max_batch sequences as with none."""
    if not prefill_tokens:
        return True
    limit, here, there = source.max_batch, source.running, load.running
    gained = (limit - here) * source.longest
    prefill = (there + here) * -(-source.kv_tokens // prefill_tokens)
    slower = source.longest * here * there * (2 * limit + here + there)
    return (gained - prefill) * (limit + here) * (limit + there) > slower
