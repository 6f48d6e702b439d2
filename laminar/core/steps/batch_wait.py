"""The end of a batch's wait: act on the group that an idle trainer waits for.

Reads   the first group that the next batch lacks, replicas with room
Writes  trajectory.batch_timeouts, trajectory.status, state.work.unscored
Emits   GenerateTrajectory, EndTrajectories
"""

from __future__ import annotations

from laminar.core import store_orders
from laminar.core.context import Context
from laminar.core.scheduling import groups, recovery
from laminar.core.scheduling.dispatch import lose_trajectory, place_lost
from laminar.core.state import indexes, keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import IN_ENGINE, UNFINISHED
from laminar.core.state.work import Group, Trajectory
from laminar.core.steps import batching
from laminar.events.reasons import DropReason

WAITS_MAX = 3
"""The expiries of a batch's wait after which the awaited group is dropped, the only such drop."""


def handle_batch_timeout(ctx: Context) -> None:
    """Act on the group that the trainer has idled for during batch_timeout_s."""
    state = ctx.state
    group = batching.find_awaited_group(state)
    if group is None or not batching.is_trainer_idle(state):
        return ctx.ignore("nothing-awaited")
    ctx.set_timer(keys.BATCH_TIMEOUT, state.settings.batch_timeout_ms)
    if store_orders.is_store_awaited(state):
        return
    late = [t for t in groups.list_members(state, group.id) if t.status in UNFINISHED]
    for trajectory in late:
        trajectory.batch_timeouts += 1
    if any(t.batch_timeouts >= WAITS_MAX for t in late):
        return groups.drop_group(ctx, group, DropReason.BATCH_TIMEOUT)
    for trajectory in late:
        _unblock_trajectory(ctx, group, trajectory)


def _unblock_trajectory(ctx: Context, group: Group, trajectory: Trajectory) -> None:
    """Move it elsewhere on its version; else drop it if enough siblings are scored, or restart."""
    state = ctx.state
    if trajectory.status == TrajectoryStatus.WAITING:
        return  # its session has a time limit of its own
    if trajectory.status == TrajectoryStatus.GENERATED:
        ctx.end_command(groups.get_score_key(state, trajectory))
        state.work.unscored[trajectory.id] = None
        return
    index = indexes_of(state).replicas
    elsewhere = index.find_least_loaded(
        recovery.able_kinds(state, trajectory), 1, but=(trajectory.replica,)
    )
    if trajectory.status in IN_ENGINE and elsewhere is not None:
        lose_trajectory(ctx, trajectory.id)
        place_lost(ctx, trajectory, elsewhere)
    elif len(groups.scored_members(state, group)) >= state.settings.min_scored:
        groups.drop_sibling(ctx, trajectory, DropReason.BATCH_TIMEOUT)
    else:
        if trajectory.status in IN_ENGINE:
            lose_trajectory(ctx, trajectory.id)
        if not trajectory.is_unsampled:  # else its session only waits for a place
            indexes.restart_from_prompt(state, trajectory)
