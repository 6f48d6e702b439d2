"""The turns of a trajectory as a tree: the context of a turn follows an earlier turn, or none.

Gives   Parents; find_parent, find_path, list_paths, count_read_again

A conversation that is only continued is one path. Each path from a root to a turn that nothing
follows is a branch: the sequence that the model reads, and a row of training. Paths may share their
beginnings, so a sampled token can be in several rows; a trajectory has it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Parents = tuple[int, ...]
"""The turn that the context of each turn follows, ROOT if none; (): always the turn before."""
ROOT = -1


def find_parent(parents: Parents, turn: int) -> int:
    return parents[turn] if parents else turn - 1


def find_path(parents: Parents, turn: int) -> list[int]:
    """Return the turns from the root to `turn`."""
    path = [turn]
    while (before := find_parent(parents, path[-1])) != ROOT:
        path.append(before)
    return path[::-1]


def list_paths(parents: Parents, turns: int) -> list[list[int]]:
    """Return the path to each turn that nothing follows, in the order of these turns."""
    followed = {find_parent(parents, turn) for turn in range(turns)}
    return [find_path(parents, turn) for turn in range(turns) if turn not in followed]


def count_read_again(parents: Parents, lengths: Sequence[int]) -> int:
    """Return the tokens that rows read in addition to those of the row that had them first.

    `lengths`: tokens of each turn with its context. A second turn after the same parent reads the
    whole path to it again.
    """
    if not parents:
        return 0
    paths, known = list_paths(parents, len(lengths)), set[int]()
    return sum(lengths[turn] for turn in _iter_known(paths, known))


def _iter_known(paths: Iterable[Sequence[int]], known: set[int]) -> Iterable[int]:
    for path in paths:
        yield from (turn for turn in path if turn in known)
        known.update(path)
