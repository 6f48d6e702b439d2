"""Stragglers: which replicas run nothing else, their load, and how many could take new work.

Reads   replicas with their gauges, trajectories, groups, relays, the staleness bound
Writes  nothing
Gives   find_stragglers (StragglerLoad by version), released_max; find_not_straggler_reason,
        find_not_emptied_reason, find_not_migrated_reason

A replica has only stragglers when it takes no new group, nothing waits for a slot as of the last
command that it was given, and it runs fewer than a decode step has room for. This is computed from
the state each time; nothing is latched.
"""

from __future__ import annotations

from laminar.core.scheduling import admission
from laminar.core.state.indexes import indexes_of, is_streaming
from laminar.core.state.members import Replica
from laminar.core.state.migrations import NotStragglerReason, StayReason, StragglerLoad
from laminar.core.state.state import State
from laminar.core.state.work import Trajectory
from laminar.names.ids import Purpose

MIGRATIONS_MAX = 3
"""The maximum number of migrations of one trajectory; in a trial none gained from more."""


def find_stragglers(state: State) -> dict[int, list[StragglerLoad]]:
    """Return the replicas with only stragglers by version, in the order of state.members.replicas.

    Admission is checked once for each kind of replica, and a load is recomputed only after a
    change."""
    indexes = indexes_of(state)
    index, kept = indexes.replicas, indexes.standings
    kinds = index.filter_kinds(lambda kind: kind.serving)
    refusing = [
        k
        for k in kinds
        if admission.find_not_admitted_reason(state, index.replicas[next(index.iter_numbers([k]))])
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


def find_not_straggler_reason(state: State, replica: Replica) -> NotStragglerReason | None:
    """Return why a serving replica does not count as having only stragglers; None: it does."""
    return find_engine_reason(state, replica) or (
        None if admission.find_not_admitted_reason(state, replica) else NotStragglerReason.ADMITS
    )


def find_engine_reason(state: State, replica: Replica) -> NotStragglerReason | None:
    """Return why its engine rules a replica out; None: it does not."""
    packing = replica.repack
    if packing is None or packing.known_command_id < packing.last_command_id:
        return NotStragglerReason.NO_GAUGES
    if packing.waiting:
        return NotStragglerReason.WAITING
    if is_streaming(state, replica.name):
        return NotStragglerReason.STREAMING
    if not replica.load:
        return NotStragglerReason.EMPTY
    return NotStragglerReason.FULL if replica.load >= packing.max_batch else None


def _get_straggler_load(state: State, replica: Replica) -> StragglerLoad:
    """Return the load of a replica and whether it may migrate; cached until a part changes."""
    standing, lasts = standing_of(state, replica)
    if lasts:
        indexes_of(state).standings[replica.name] = standing
    return standing


def standing_of(state: State, replica: Replica) -> tuple[StragglerLoad, bool]:
    """Compute the load of a replica with only stragglers, and whether it may be cached.

    The load, which assumes that the replica may take new work, can be cached if it follows from the
    replica and its groups only, and not from the mean of all finished trajectories."""
    packing = replica.repack
    assert packing is not None, replica
    trajectories, progress, lengths = (
        state.work.trajectories,
        state.repack.progress,
        indexes_of(state).lengths,
    )
    there = [*replica.running, *replica.incoming]
    movable, lasts = not replica.incoming, True
    held = growth = longest = 0
    for name in there:
        trajectory, known = trajectories[name], progress[name]
        siblings = lengths.get(trajectory.group)  # else the mean of all finished
        left = _estimate_tokens_left(
            siblings or (state.repack.finished, state.repack.finished_tokens), known.sampled
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
        room=admission.count_free_slots(replica),
        kv_capacity=packing.kv_capacity,
        max_batch=packing.max_batch,
        movable=movable,
    )
    return standing, lasts


def _estimate_tokens_left(finished: tuple[int, int], sampled: int) -> int:
    """Estimate the tokens left to sample, given the count and tokens of finished trajectories.

    A trajectory is expected to reach their mean length; one beyond it, to sample half as much
    again."""
    count, tokens = finished
    return max(tokens // max(count, 1) - sampled, sampled // 2, 1)


def find_not_emptied_reason(state: State, replica: Replica) -> StayReason | None:
    """Return why a replica with only stragglers is not emptied, given room; None: it may be.

    It must be able to take new work, and none of its trajectories may be of the kinds that stay."""
    if replica.incoming:
        return StayReason.RECEIVES
    return _find_not_newer_reason(state, replica) or _find_work_stays_reason(state, replica)


def _find_not_newer_reason(state: State, replica: Replica) -> StayReason | None:
    """Return why it could not begin with newer weights: the same for a version behind a relay."""
    if state.versions.newest <= replica.version:
        return StayReason.NO_NEWER_WEIGHTS
    if state.members.newest_for(replica) != state.versions.newest:
        return StayReason.WEIGHTS_NOT_HERE
    evaluation = state.evaluations.running
    if evaluation is not None and evaluation.queue and evaluation.version == replica.version:
        return StayReason.EVALUATION
    return None


def _find_work_stays_reason(state: State, replica: Replica) -> StayReason | None:
    found = (find_not_migrated_reason(state, state.work.trajectories[t]) for t in replica.running)
    return next(filter(None, found), None)


def find_not_migrated_reason(state: State, trajectory: Trajectory) -> StayReason | None:
    """Return why this trajectory is not migrated; None: it may be."""
    if state.work.groups[trajectory.group].purpose != Purpose.TRAIN:
        return StayReason.EVALUATION_SAMPLE
    if trajectory.batch_timeouts:
        return StayReason.BATCH_WAITS
    if trajectory.deaths:
        return StayReason.CAUSED_LOSSES
    progress = state.repack.progress[trajectory.id]
    if progress.source:
        return StayReason.RECEIVES
    return StayReason.MIGRATED_OFTEN if progress.migrations >= MIGRATIONS_MAX else None


def released_max(state: State) -> int:
    """Return how many replicas could get their share of new groups on the newest version now.

    Replicas that are empty or load get theirs first."""
    admitted = min(admission.groups_wanted(state), within_bound(state))
    index = indexes_of(state).replicas
    busy = dict.fromkeys(index.iter_empty(list(index.kinds)))
    busy |= dict.fromkeys(index.iter_numbers(index.filter_kinds(lambda kind: kind.loading)))
    return max(admitted // admission.first_share(state) - len(busy), 0)


def within_bound(state: State) -> int:
    """Return the new groups of the newest version that the staleness bound admits now.

    No existing group has a later deadline than theirs."""
    settings = state.settings
    deadline = state.versions.newest_step + settings.max_staleness
    unchosen = sum(state.work.deadlines.values())
    return settings.groups_per_step * (deadline - state.steps.chosen + 1) - unchosen
