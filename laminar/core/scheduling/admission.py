"""Admission: whether a replica may start a new group. The staleness bound is one inequality.

Reads   state.work.deadlines, state.steps.chosen, replica, settings
Writes  nothing

A group generated with the weights of step k has deadline k + max_staleness: the last batch index
that may train it. With G groups per batch and s the next batch to be chosen, for every d >= s - 1
the unchosen groups with deadline <= d number at most G * (d - s + 1). Admission keeps the bound by
not starting a group, batch choice by waiting; so nothing is ever dropped for its age, and there is
no other limit on the experience buffer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from laminar.core.scheduling import sessions
from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase


class NotAdmittedReason(StrEnum):
    """The reasons why a replica takes no new group."""

    RUN_ENDING = "run-ending"
    REPACKED = "repacked"
    NOT_SERVING = "not-serving"
    NO_DATA = "no-data"
    DRAINING = "draining"
    STALENESS_BOUND = "staleness-bound"


def bound_holds(deadlines: dict[int, int], chosen: int, groups_per_step: int) -> bool:
    """Return whether the inequality holds; `deadlines` counts unchosen groups by deadline.

    `chosen` is the index of the next batch."""
    within = 0
    for deadline in sorted(deadlines):
        within += deadlines[deadline]
        if within and within > groups_per_step * (deadline - chosen + 1):
            return False
    return True


def bound_allows(state: State, deadline: int) -> bool:
    """Return whether one more unchosen group with this deadline keeps the bound.

    The bound holds so far, and the group counts from its deadline on."""
    unchosen = state.work.deadlines.items()
    deadlines = {d: count for d, count in unchosen if d > deadline}
    deadlines[deadline] = 1 + sum(count for d, count in unchosen if d <= deadline)
    return bound_holds(deadlines, state.steps.chosen, state.settings.groups_per_step)


def groups_wanted(state: State) -> int:
    """Return how many new groups the rest of the run can use (a large number without a limit)."""
    data = state.data
    settings = state.settings
    if settings.total_steps:
        unchosen = sum(state.work.deadlines.values())
        return settings.groups_per_step * (settings.total_steps - state.steps.chosen) - unchosen
    return settings.total_epochs * data.num_train - data.cursor + len(data.unfinished_prompts)


def is_serving(state: State, replica: Replica) -> bool:
    """Return whether a replica is alive, with weights, not loading and not being emptied."""
    busy = replica.loading or replica.outgoing
    return replica.version >= 0 and not busy and state.members.is_actor_alive(replica.name)


def count_free_slots(replica: Replica) -> int:
    """Return how many more trajectories a replica has room for; reserved room counts as taken."""
    return replica.capacity - replica.load


def get_replica_share(state: State) -> int:
    """Return the most trajectories of new groups that a replica runs at a time; 0: no limit.

    With the policy gain each live replica has an equal part of what the staleness bound admits,
    since the first one with new weights would take all of it while others are idle."""
    settings = state.settings
    if settings.repack_policy != "gain":
        return 0
    admitted = settings.groups_per_step * (settings.max_staleness + 1)
    return settings.group_size * -(-admitted // max(indexes_of(state).replicas.num_live, 1))


def first_share(state: State) -> int:
    """Return how many new groups a replica takes at once when it has loaded."""
    settings = state.settings
    at_a_time = get_replica_share(state) // settings.group_size or settings.groups_per_version
    return min(settings.groups_per_version, at_a_time)


def has_room_for_group(state: State, replica: Replica) -> bool:
    """Return whether there is room for a whole group, within the replica's share.

    With sessions a group takes no slots before it requests turns."""
    size, most = state.settings.group_size, get_replica_share(state)
    within = not most or state.settings.has_environment or replica.load + size <= most
    return within and has_room(state, replica, size)


def has_room(state: State, replica: Replica, count: int) -> bool:
    """Return whether `count` more trajectories can begin: in sessions, or in a replica's slots."""
    if state.settings.has_environment:
        return sessions.has_room(state, count)
    return count_free_slots(replica) >= count


def find_not_admitted_reason(state: State, replica: Replica) -> NotAdmittedReason | None:
    """Return why this replica takes no new group now; None: it does.

    This is computed afresh each time, never latched: a replica that took its share continues with
    its version as long as the relay of its machine holds nothing newer."""
    if state.run.phase != Phase.RUNNING or state.run.draining:
        return NotAdmittedReason.RUN_ENDING
    if replica.outgoing:
        return NotAdmittedReason.REPACKED
    if not is_serving(state, replica):
        return NotAdmittedReason.NOT_SERVING
    if groups_wanted(state) <= 0:
        return NotAdmittedReason.NO_DATA
    took_its_share = 0 < state.settings.groups_per_version <= replica.groups_taken
    if took_its_share and state.members.newest_for(replica) > replica.version:
        return NotAdmittedReason.DRAINING
    if not bound_allows(state, replica.step + state.settings.max_staleness):
        return NotAdmittedReason.STALENESS_BOUND
    return None


def is_admitting(state: State, replica: Replica) -> bool:
    """Return whether a replica is not refused; a full one admits, too, once it has room."""
    return not find_not_admitted_reason(state, replica)


def find_full_resource(state: State, replica: Replica) -> Literal["slots", "sessions"] | None:
    """Return what an admitting replica lacks for another group; None: nothing."""
    if has_room(state, replica, state.settings.group_size):
        return None
    return "sessions" if state.settings.has_environment else "slots"
