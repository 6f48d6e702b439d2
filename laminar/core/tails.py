"""Tails: which replicas run only stragglers, what these hold, and how many could take new work.

Reads   replicas with their gauges, trajectories, groups, relays, the staleness bound
Writes  nothing
Gives   tails (Standing by version), released_max; at_work, stays, trajectory_stays: why not

A replica is in its tail when it takes no new group, nothing waits for a slot as of the last command
that it was given, and it runs fewer than a decode step has room for. It follows from the state each
time; nothing is latched.
"""

from __future__ import annotations

from laminar.core import groups
from laminar.core.admission import groups_wanted, refusal, room
from laminar.core.indexes import indexes_of
from laminar.core.repack import Standing
from laminar.core.state import Replica, State, Trajectory
from laminar.ids import Purpose

MOVES_MAX = 3
"""Of one trajectory. In a trial none gained by more."""


def tails(state: State) -> dict[int, list[Standing]]:
    """Of every version, its replicas in their tail, in the order of state.replicas.

    Whether they admit is asked once for each kind of them.
    """
    index = indexes_of(state).replicas
    kinds = index.of(lambda kind: kind.serving)
    refusing = [k for k in kinds if refusal(state, index.replicas[next(index.numbers_of([k]))])]
    found: dict[int, list[Standing]] = {}
    for number in sorted(index.numbers_of(refusing)):
        replica = index.replicas[number]
        if not _engine_at_work(replica):
            found.setdefault(replica.version, []).append(_standing(state, replica))
    return found


def at_work(state: State, replica: Replica) -> str:
    """Why a replica that serves is not in its tail; empty: it is."""
    return _engine_at_work(replica) or ("" if refusal(state, replica) else "admits")


def _engine_at_work(replica: Replica) -> str:
    packing = replica.packing
    if packing is None or packing.as_of < packing.asked:
        return "not-heard"
    if packing.waiting:
        return "waiting"
    if not replica.load:
        return "empty"
    return "full" if replica.load >= packing.max_batch else ""


def _standing(state: State, replica: Replica) -> Standing:
    packing = replica.packing
    assert packing is not None, replica
    there = [state.trajectories[t] for t in (*replica.running, *replica.incoming)]
    held = [state.progress[t.id] for t in there]
    left = [expected_left(state, trajectory) for trajectory in there]
    return Standing(
        name=replica.name,
        kv_tokens=sum(p.prompt_tokens + p.sampled for p in held),
        growth_tokens=sum(left),
        longest=max(left),
        running=len(there),
        room=room(replica),
        kv_capacity=packing.kv_capacity,
        max_batch=packing.max_batch,
        movable=not stays(state, replica),
    )


def expected_left(state: State, trajectory: Trajectory) -> int:
    """Tokens that it is expected to sample yet: as many as its finished siblings had on average,
    else all that have finished; what is longer than that already, half as much again."""
    group = state.groups[trajectory.group]
    siblings = [t.num_tokens for t in groups.members(state, group.id) if t.num_tokens]
    if siblings:
        mean = sum(siblings) // len(siblings)
    else:
        mean = state.finished_tokens // max(state.finished, 1)
    sampled = state.progress[trajectory.id].sampled
    return max(mean - sampled, sampled // 2, 1)


def stays(state: State, replica: Replica) -> str:
    """Why a replica in its tail is not emptied, whatever room there is elsewhere; empty: it may be.

    It must be able to take new work, and nothing that it runs may be of the kinds that stay.
    """
    if replica.incoming:
        return "receives"
    if state.newest <= replica.version:
        return "no-newer-weights"
    if state.newest_for(replica) != state.newest:
        return "weights-not-here"
    evaluation = state.evaluation
    if evaluation is not None and evaluation.queue and evaluation.version == replica.version:
        return "evaluation"
    found = (trajectory_stays(state, state.trajectories[t]) for t in replica.running)
    return next(filter(None, found), "")


def trajectory_stays(state: State, trajectory: Trajectory) -> str:
    """Why this one is not moved; empty: it may be."""
    if state.groups[trajectory.group].purpose != Purpose.TRAIN:
        return "held-out"
    if trajectory.waits:
        return "waited-for"
    if trajectory.deaths:
        return "seen-deaths"
    return "moved-often" if state.progress[trajectory.id].moves >= MOVES_MAX else ""


def released_max(state: State) -> int:
    """How many replicas could get their share of new groups on the newest version now.

    Those that are empty or load get theirs first.
    """
    settings = state.settings
    admitted = min(groups_wanted(state), within_bound(state))
    index = indexes_of(state).replicas
    busy = dict.fromkeys(index.empty(list(index.kinds)))
    busy |= dict.fromkeys(index.numbers_of(index.of(lambda kind: kind.loading)))
    return max(admitted // settings.groups_per_version - len(busy), 0)


def within_bound(state: State) -> int:
    """New groups of the newest version that the staleness bound admits now; no group that there is
    has a later deadline than theirs."""
    settings = state.settings
    deadline = state.newest_step + settings.max_staleness
    unchosen = sum(state.deadlines.values())
    return settings.groups_per_step * (deadline - state.chosen + 1) - unchosen
