"""Repack: which replicas give what they run to which others, so that they can take new work.

Reads   Standing of the replicas in their tail, all of one weight version
Gives   plan: moves, each of everything that one replica runs to another one; why_not, of one that
        is not moved
Source  the paper's section 5, Algorithm 1; its faults are mended: a replica that has been given
        work is not emptied later, and room is left for what moved work still samples

Pure and in whole numbers. Times are counted in decode steps: a replica that is emptied gains the
steps for which its stragglers would have kept it; what they cost elsewhere is prefill, during which
the destination's batch waits, and slower steps there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

LOOKED_AT = 4
"""Destinations of each class for one source: planning for 10,000 replicas takes no seconds."""


class Standing(NamedTuple):
    """What a replica in its tail runs, and what it can hold."""

    name: str
    kv_tokens: int  #: of what it runs
    growth_tokens: int  #: that this is expected to sample yet
    longest: int  #: the most of these of one trajectory: decode steps until it is empty
    running: int  #: trajectories
    room: int  #: for so many more
    kv_capacity: int  #: tokens
    max_batch: int  #: the most sequences of a decode step within its budget (the paper's B)
    movable: bool  #: may be emptied, and can take new work when it is

    @property
    def need(self) -> int:
        """Tokens of cache to reckon with: not all of it has all its growth at the same time."""
        return self.kv_tokens + self.growth_tokens // 2


class Move(NamedTuple):
    """Everything that `source` runs goes to `destination`."""

    source: str
    destination: str


class _Load:
    """A replica with what is planned for it."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.need, self.running = standing.need, standing.running
        self.pinned = False

    @property
    def spare(self) -> int:
        """For so many more trajectories."""
        here = self.standing
        return min(here.max_batch, here.running + here.room) - self.running

    def fits(self, source: Standing) -> bool:
        return self.need + source.need <= self.standing.kv_capacity and source.running <= self.spare

    def take(self, source: Standing) -> None:
        self.need += source.need
        self.running += source.running
        self.pinned = True


class _Destinations:
    """Those that are not emptied, by how many more each can run: in classes of powers of two, so
    that a search looks at a few of them and not at all; within a class by need."""

    def __init__(self, loads: list[_Load]) -> None:
        self._loads = loads
        self._classes: dict[int, list[tuple[int, int]]] = {}
        self._need_max = max((load.standing.kv_capacity for load in loads), default=0)
        for number in range(len(loads)):
            self.put_in(number)

    def put_in(self, number: int) -> None:
        load = self._loads[number]
        insort(self._classes.setdefault(load.spare.bit_length(), []), (load.need, number))

    def take_out(self, number: int) -> None:
        load = self._loads[number]
        ranked = self._classes[load.spare.bit_length()]
        del ranked[bisect_left(ranked, (load.need, number))]

    def for_source(self, source: Standing) -> list[int]:
        """Some on which it fits, the one with the most on it first."""
        found: list[tuple[int, int]] = []
        for size, ranked in self._classes.items():
            if size < source.running.bit_length():
                continue
            end = bisect_right(ranked, (self._need_max - source.need, len(self._loads)))
            some = ranked[max(end - LOOKED_AT, 0) : end]
            found += [entry for entry in some if self._loads[entry[1]].fits(source)]
        return [number for _, number in sorted(found, reverse=True)]


def plan(tail: Sequence[Standing], released_max: int, prefill_tokens: int) -> list[Move]:
    """At most so many moves; sources ascending by their cache, each to the fullest that has room.

    `prefill_tokens` are prefilled in the time of a decode step; 0: what it costs is not asked.
    """
    loads = [_Load(standing) for standing in tail]
    destinations = _Destinations(loads)
    moves: list[Move] = []
    for number in sorted(range(len(tail)), key=lambda n: (tail[n].kv_tokens, n)):
        source = tail[number]
        if len(moves) >= released_max:
            break
        if loads[number].pinned or not source.movable:
            continue
        destinations.take_out(number)
        for other in destinations.for_source(source):
            if _pays(source, loads[other], prefill_tokens):
                destinations.take_out(other)
                loads[other].take(source)
                destinations.put_in(other)
                moves.append(Move(source.name, tail[other].name))
                break
        else:
            destinations.put_in(number)
    return moves


def why_not(source: Standing, others: Sequence[Standing], prefill_tokens: int) -> str:
    """Why a plan leaves this one where it is, though it may be emptied; empty: it need not.

    `others`: of its version in their tail. `prefill_tokens`: as for a plan.
    """
    if not others:
        return "alone"
    fitting = [load for load in map(_Load, others) if load.fits(source)]
    if not fitting:
        return "no-room"
    return "" if any(_pays(source, load, prefill_tokens) for load in fitting) else "no-gain"


def _pays(source: Standing, load: _Load, prefill_tokens: int) -> bool:
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
