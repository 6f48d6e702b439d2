"""Repack: which replicas give what they run to which others, so that they can take new work.

Reads   Standing of the replicas in their tail, all of one weight version
Gives   plan: moves, each of everything that one replica runs to another one
Source  the paper's section 5, Algorithm 1; its faults are mended: a replica that has been given
        work is not emptied later, and room is left for what moved work still samples

Pure and in whole numbers. Times are counted in decode steps: a replica that is emptied gains the
steps for which its stragglers would have kept it; what they cost elsewhere is prefill, during which
the destination's batch waits, and slower steps there.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple


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
        self.need, self.count = standing.need, standing.running
        self.pinned = self.emptied = False

    def fits(self, source: Standing) -> bool:
        here = self.standing
        return self.need + source.need <= here.kv_capacity and self.count + source.running <= min(
            here.max_batch, here.running + here.room
        )

    def take(self, source: Standing) -> None:
        self.need += source.need
        self.count += source.running
        self.pinned = True


def plan(tail: Sequence[Standing], released_max: int, prefill_tokens: int) -> list[Move]:
    """At most so many moves; sources ascending by their cache, each to the fullest that has room.

    `prefill_tokens` are prefilled in the time of a decode step; 0: what it costs is not asked.
    """
    loads = [_Load(standing) for standing in tail]
    #: (need, number) of those that are not emptied, ascending
    open_loads = sorted((load.need, number) for number, load in enumerate(loads))
    moves: list[Move] = []
    for number in sorted(range(len(tail)), key=lambda n: (tail[n].kv_tokens, n)):
        source = loads[number]
        if len(moves) >= released_max:
            break
        if source.pinned or not tail[number].movable:
            continue
        found = _fullest(loads, open_loads, number, tail[number], prefill_tokens)
        if found is None:
            continue
        destination = loads[found]
        open_loads.remove((source.need, number))
        open_loads.remove((destination.need, found))
        destination.take(tail[number])
        source.emptied = True
        insort(open_loads, (destination.need, found))
        moves.append(Move(tail[number].name, tail[found].name))
    return moves


def _fullest(
    loads: list[_Load],
    open_loads: list[tuple[int, int]],
    number: int,
    source: Standing,
    prefill_tokens: int,
) -> int | None:
    """Of those that the source fits on, the one with the most on it; None: there is none."""
    most = max(load.standing.kv_capacity for load in loads) - source.need
    for _, other in reversed(open_loads[: bisect_right(open_loads, (most, len(loads)))]):
        load = loads[other]
        if other != number and load.fits(source) and _pays(source, load, prefill_tokens):
            return other
    return None


def _pays(source: Standing, load: _Load, prefill_tokens: int) -> bool:
    """Steps of sequences that the emptied replica gains, against those that are lost elsewhere.

    A decode step is taken to be twice as long with max_batch sequences as with none.
    """
    if not prefill_tokens:
        return True
    limit, here, there = source.max_batch, source.running, load.count
    gained = (limit - here) * source.longest
    prefill = (there + here) * -(-source.kv_tokens // prefill_tokens)
    slower = source.longest * here * there * (2 * limit + here + there)
    return (gained - prefill) * (limit + here) * (limit + there) > slower
