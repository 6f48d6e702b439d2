"""Tails: which replicas run only stragglers, what these hold, and how many could take new work.

Reads   replicas with their gauges, trajectories, groups, relays, the staleness bound
Writes  nothing
Gives   tails (StragglerLoad by version), released_max; why_not_in_tail, why_not_emptied,
        why_not_moved

A replica is in its tail when it takes no new group, nothing waits for a slot as of the last command
that it was given, and it runs fewer than a decode step has room for. It follows from the state each
time; nothing is latched.
"""

from __future__ import annotations

from laminar.core.scheduling.admission import (
    count_free_slots,
    find_not_admitted_reason,
    first_share,
    groups_wanted,
)
from laminar.core.state.indexes import indexes_of, is_streaming
from laminar.core.state.state import Replica, State, Trajectory
from laminar.core.state.straggler_load import StragglerLoad
from laminar.names.ids import Purpose

MIGRATIONS_MAX = 3
"""Moves of one trajectory. In a trial none gained by more."""


def find_stragglers(state: State) -> dict[int, list[StragglerLoad]]:
    """The replicas in their tail by version, in the order of state.replicas.

    Whether they admit is asked once for each kind of them, and what they hold is counted only where
    something of it has changed since it was asked last.
    """
    indexes = indexes_of(state)
    index, kept = indexes.replicas, indexes.standings
    kinds = index.filter_kinds(lambda kind: kind.serving)
    refusing = [
        k
        for k in kinds
        if find_not_admitted_reason(state, index.replicas[next(index.iter_numbers([k]))])
    ]
    staying: dict[tuple[int, str], bool] = {}  #: by version and relay
    found: dict[int, list[StragglerLoad]] = {}
    for number in sorted(index.iter_numbers(refusing)):
        replica = index.replicas[number]
        standing = kept.get(replica.name)
        if standing is None:
            if find_engine_reason(state, replica):
                continue
            standing = _get_straggler_load(state, replica)
        place = replica.version, replica.relay
        stay = staying.get(place)
        if stay is None:
            stay = staying[place] = bool(_find_not_newer_reason(state, replica))
        if stay and standing.movable:
            standing = standing._replace(movable=False)
        found.setdefault(replica.version, []).append(standing)
    return found


def find_not_straggler_reason(state: State, replica: Replica) -> str:
    """Why a replica that serves is not in its tail; empty: it is."""
    return find_engine_reason(state, replica) or (
        "" if find_not_admitted_reason(state, replica) else "admits"
    )


def find_engine_reason(state: State, replica: Replica) -> str:
    """Why its engine keeps a replica out of its tail; empty: it does not."""
    packing = replica.packing
    if packing is None or packing.as_of < packing.asked:
        return "not-heard"
    if packing.waiting:
        return "waiting"
    if is_streaming(state, replica.name):
        return "streams"
    if not replica.load:
        return "empty"
    return "full" if replica.load >= packing.max_batch else ""


def _get_straggler_load(state: State, replica: Replica) -> StragglerLoad:
    """What it holds, and whether that may move; kept until something of it changes."""
    standing, lasts = standing_of(state, replica)
    if lasts:
        indexes_of(state).standings[replica.name] = standing
    return standing


def standing_of(state: State, replica: Replica) -> tuple[StragglerLoad, bool]:
    """The standing of a replica in its tail, wherever it may take new work; and whether it follows
    from what the replica and the groups that it runs have done, and not from the mean of all that
    has finished."""
    packing = replica.packing
    assert packing is not None, replica
    trajectories, progress, lengths = state.trajectories, state.progress, indexes_of(state).lengths
    there = [*replica.running, *replica.incoming]
    movable, lasts = not replica.incoming, True
    held = growth = longest = 0
    for name in there:
        trajectory, known = trajectories[name], progress[name]
        siblings = lengths.get(trajectory.group)  # else all that have finished are asked
        left = _estimate_tokens_left(
            siblings or (state.finished, state.finished_tokens), known.sampled
        )
        held += known.prompt_tokens + known.sampled
        growth += left
        longest = max(longest, left)
        lasts = lasts and siblings is not None
        movable = movable and not find_not_migrated_reason(state, trajectory)
    standing = StragglerLoad(
        name=replica.name,
        kv_tokens=held,
        need=held + growth // 8,
        longest=longest,
        running=len(there),
        room=count_free_slots(replica),
        kv_capacity=packing.kv_capacity,
        max_batch=packing.max_batch,
        movable=movable,
    )
    return standing, lasts


def _estimate_tokens_left(finished: tuple[int, int], sampled: int) -> int:
    """Tokens that it is expected to sample yet: as many as those that have finished (how many, and
    their tokens) had on average; what is longer than that already, half as much again."""
    count, tokens = finished
    return max(tokens // max(count, 1) - sampled, sampled // 2, 1)


def find_not_emptied_reason(state: State, replica: Replica) -> str:
    """Why a replica in its tail is not emptied, whatever room there is elsewhere; empty: it may be.

    It must be able to take new work, and nothing that it runs may be of the kinds that stay.
    """
    if replica.incoming:
        return "receives"
    return _find_not_newer_reason(state, replica) or _find_work_stays_reason(state, replica)


def _find_not_newer_reason(state: State, replica: Replica) -> str:
    """Why it could not begin with newer weights: the same for all of a version behind a relay."""
    if state.newest <= replica.version:
        return "no-newer-weights"
    if state.newest_for(replica) != state.newest:
        return "weights-not-here"
    evaluation = state.evaluation
    if evaluation is not None and evaluation.queue and evaluation.version == replica.version:
        return "evaluation"
    return ""


def _find_work_stays_reason(state: State, replica: Replica) -> str:
    found = (find_not_migrated_reason(state, state.trajectories[t]) for t in replica.running)
    return next(filter(None, found), "")


def find_not_migrated_reason(state: State, trajectory: Trajectory) -> str:
    """Why this one is not moved; empty: it may be."""
    if state.groups[trajectory.group].purpose != Purpose.TRAIN:
        return "held-out"
    if trajectory.waits:
        return "waited-for"
    if trajectory.deaths:
        return "seen-deaths"
    progress = state.progress[trajectory.id]
    if progress.source:
        return "receives"
    return "moved-often" if progress.moves >= MIGRATIONS_MAX else ""


def released_max(state: State) -> int:
    """How many replicas could get their share of new groups on the newest version now.

    Those that are empty or load get theirs first.
    """
    admitted = min(groups_wanted(state), within_bound(state))
    index = indexes_of(state).replicas
    busy = dict.fromkeys(index.iter_empty(list(index.kinds)))
    busy |= dict.fromkeys(index.iter_numbers(index.filter_kinds(lambda kind: kind.loading)))
    return max(admitted // first_share(state) - len(busy), 0)


def within_bound(state: State) -> int:
    """New groups of the newest version that the staleness bound admits now; no group that there is
    has a later deadline than theirs."""
    settings = state.settings
    deadline = state.newest_step + settings.max_staleness
    unchosen = sum(state.deadlines.values())
    return settings.groups_per_step * (deadline - state.chosen + 1) - unchosen
